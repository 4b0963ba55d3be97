"""Two GMIs sharing one GPU through the direct backend: session, reduction of device tensors, the state's way back."""

import pytest
import torch

from placement.inventory import local_machine
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.coordinator.session import Session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.cluster,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing here was verified"),
]


def spec(transport):
    return RunSpec(
        env=EnvSpec(id="InvertedPendulum-v5"),
        gmi=GmiSpec(backend="direct", gmis_per_gpu=2, num_gmis=2, num_envs=4, transport=transport),
        network=NetworkSpec(hidden=(16,)),
        learning=PPOSpec(rollout_length=8, num_minibatches=2, num_epochs=1),
    )


def test_nvml_and_torch_name_the_same_device():
    (first, *_) = local_machine().nodes[0].gpus
    properties = torch.cuda.get_device_properties(first.index)
    assert str(properties.uuid) in first.uuid
    assert first.sm_count in (None, properties.multi_processor_count)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_two_gmis_train_save_and_resume_on_one_gpu(transport):
    with Session(spec(transport)) as session:
        assert {gmi_slice.gpu_uuid for gmi_slice in session.plan.slices} == {
            local_machine().nodes[0].gpus[0].uuid
        }
        session.train(2)
        state = session.state_dict()
        expected = session.train(1)[0].metrics["policy_loss"]
    moments = state["shared"]["learner"]["optimiser"]["state"][0]["exp_avg"]
    assert moments.device.type == "cpu"
    with Session(spec(transport)) as session:
        session.load_state_dict(state)
        assert session.train(1)[0].metrics["policy_loss"] == pytest.approx(expected, rel=1e-4)
