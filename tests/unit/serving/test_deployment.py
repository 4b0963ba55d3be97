"""Policies as files: what ONNX Runtime and torch compute of them, beside the policy server's actions."""

import builtins
import json
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
from saved_runs import saved_run

from rayagi.algorithms.dqn import DQN
from rayagi.cli.main import main
from rayagi.config.spec import NetworkSpec, RunSpec
from rayagi.serving.deployment import export_policy
from rayagi.serving.errors import ExportError
from rayagi.serving.policy_server.served_policy import GreedyPolicy, policy_info
from rayagi.serving.source import SavedPolicy
from tests.unit.models.test_policy_module import CHOICE, INFO, NETWORK, OTHERS, policy_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")

RAINBOW = RunSpec(
    algorithm="dqn",
    network=NETWORK,
    learning=DQN.settings(dueling=True, noisy=True, num_atoms=5, v_min=-1.0, v_max=1.0),
)

CASES = [*OTHERS, (replace(INFO, action=CHOICE), RAINBOW)]


def saved_of(info, network):
    policy, spec = policy_of(info, network), network if isinstance(network, RunSpec) else RunSpec()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(
                3.0
            )  # the last layer starts near zero: some actions reach the bounds of their range
    return SavedPolicy(
        policy=policy,
        spec=spec,
        info=policy.info,
        checkpoint="c",
        version=7,
        env_steps=1,
        shared={},
        damaged=(),
    )


def rows_of(saved, rows):
    """Observations and states as the policy server takes them: (rows, obs_dim + state_dim)."""
    width = saved.info.obs_dim + saved.policy.state_dim
    return np.random.default_rng(rows).standard_normal((rows, width)).astype(np.float32)


def assert_same(saved, found, rows):
    own = GreedyPolicy(saved).act(rows)
    wanted = [own["actions"], own["states"]] if saved.policy.state_dim else [own]
    assert len(found) == len(wanted)
    for part, expected in zip(found, wanted, strict=True):
        assert part.dtype == expected.dtype
        np.testing.assert_allclose(part, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_onnx_runtime_computes_the_policys_actions(tmp_path, number):
    saved = saved_of(*CASES[number])
    export_policy(saved, tmp_path / "p.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "p.onnx")
    for count in (1, 2, 9):
        rows = rows_of(saved, count)
        parts = np.split(rows, [saved.info.obs_dim], axis=1)
        given = {name: part for name, part in zip(("obs", "state"), parts, strict=True) if part.shape[1]}
        names = ["actions", "next_state"] if saved.policy.state_dim else ["actions"]
        assert_same(saved, session.run(names, given), rows)
    assert json.loads(session.get_modelmeta().custom_metadata_map["rayagi"]) == policy_info(saved)


@pytest.mark.parametrize("number", [0, 2, 9, 12])
def test_torch_computes_the_policys_actions(tmp_path, number):
    saved, described = saved_of(*CASES[number]), {"rayagi.json": ""}
    export_policy(saved, tmp_path / "p.pt2")
    program = torch.export.load(tmp_path / "p.pt2", extra_files=described).module()
    for count in (1, 2, 9):
        rows = rows_of(saved, count)
        parts = torch.from_numpy(rows).split([saved.info.obs_dim, saved.policy.state_dim], -1)
        found = program(*(part for part in parts if part.shape[1]))
        found = found if isinstance(found, tuple) else (found,)
        assert_same(saved, [part.detach().numpy() for part in found], rows)
    assert json.loads(described["rayagi.json"]) == policy_info(saved)


class Branching(torch.nn.Module):
    """Its path depends on the numbers."""

    def __init__(self, obs_dim, output_dim):
        super().__init__()
        self.layer = torch.nn.Linear(obs_dim, output_dim)

    def forward(self, obs):
        return self.layer(obs if obs.sum() > 0 else -obs), self.layer(obs).sum(-1)


class Pretending(torch.nn.Module):
    """Gives other numbers while it is exported."""

    def __init__(self, obs_dim, output_dim):
        super().__init__()
        self.layer = torch.nn.Linear(obs_dim, output_dim)

    def forward(self, obs):
        return self.layer(obs) + float(torch.compiler.is_exporting()), self.layer(obs).sum(-1)


@pytest.mark.parametrize(
    ("module", "complaint"),
    [
        ("Branching", "torch cannot turn the policy's networks into a program: "),
        ("Pretending", "actions of the program differ"),
    ],
)
@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_a_network_that_cannot_be_written_so_is_refused_and_nothing_is_written(
    tmp_path, module, complaint, ending
):
    saved = saved_of(INFO, NetworkSpec(module=f"{__name__}:{module}"))
    path = tmp_path / f"p.{ending}"
    path.write_text("before")
    with pytest.raises(ExportError, match=complaint):
        export_policy(saved, path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_the_command_says_what_it_wrote_and_how_to_run_it(tmp_path, capsys):
    run = saved_run(tmp_path / "runs", core="gru")
    out = tmp_path / "a b.onnx"
    assert main(["export-policy", str(run), str(out)]) == 0
    said = capsys.readouterr().out
    assert "obs (rows, 4) and state (rows, 12) to actions (rows, 1) and next_state" in said
    code = said.split("python -c ")[1].strip().strip("'")
    exec(code)
    assert "array([[" in capsys.readouterr().out


def test_bad_input_is_one_sentence(tmp_path, capsys, monkeypatch):
    run = saved_run(tmp_path / "runs")
    assert main(["export-policy", str(run), str(tmp_path / "a.pth")]) == 2
    assert capsys.readouterr().err == (
        f"rayagi: {tmp_path / 'a.pth'}: its ending says the format: use .onnx or .pt2\n"
    )
    assert main(["export-policy", str(run), str(tmp_path / "none" / "a.pt2")]) == 1
    assert "cannot write" in capsys.readouterr().err
    original = builtins.__import__

    def without_onnx(name, *rest):
        if name == "onnx":
            raise ModuleNotFoundError("No module named 'onnx'", name="onnx")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_onnx)
    assert main(["export-policy", str(run), str(tmp_path / "a.onnx")]) == 2
    assert "needs onnx: pip install 'rayagi[onnx]', or write .pt2" in capsys.readouterr().err
