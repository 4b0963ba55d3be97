"""Networks of action values: layers, two streams, noise."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from actors.protocols import ActionSpec, EnvInfo, ObsPart
from rayagi.config.spec import NetworkSpec
from rayagi.models.networks import mlp
from rayagi.models.q_network import NoisyLinear, QNetwork

INFO = EnvInfo(
    env_id="x",
    engine="x",
    obs_dim=5,
    action=ActionSpec(kind="discrete", dim=1, num_choices=3),
    max_episode_steps=None,
)
SPEC = NetworkSpec(hidden=(8, 6), activation="relu")
OBS = torch.randn(7, 5, generator=torch.Generator().manual_seed(3))


def network(info=INFO, spec=SPEC, seed=0, **options):
    return QNetwork(info, spec, torch.Generator().manual_seed(seed), **options)


def sizes(layers):
    return [tuple(layer.weight.shape) for layer in layers]


def test_a_plain_network_is_the_mlp_of_its_hidden_layers():
    plain = network()
    assert sizes([*plain.trunk, *plain.advantage]) == [(8, 5), (6, 8), (3, 6)]
    wanted = mlp(5, (8, 6), 3, "relu", output_gain=1.0, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain(OBS).squeeze(-1), wanted(OBS))


def test_two_streams_have_a_hidden_layer_each_and_meet_as_in_equation_9():
    dueling = network(dueling=True)
    assert sizes(dueling.trunk) == [(8, 5)]
    assert sizes(dueling.advantage) == [(6, 8), (3, 6)]
    assert sizes(dueling.value) == [(6, 8), (1, 6)]
    with torch.no_grad():
        for layer in (dueling.advantage[-1], dueling.value[-1]):
            layer.weight.zero_()
        dueling.value[-1].bias.fill_(10.0)
        dueling.advantage[-1].bias.copy_(torch.tensor([1.0, 2.0, 6.0]))
    # V = 10, the mean advantage is 3
    assert dueling(OBS)[0].flatten().tolist() == [8.0, 9.0, 13.0]


def test_distributions_have_atoms_for_each_action_in_both_streams():
    assert network(num_atoms=4)(OBS).shape == (7, 3, 4)
    dueling = network(num_atoms=4, dueling=True)
    assert sizes(dueling.value)[-1] == (4, 6)


def test_two_streams_of_distributions_meet_atom_by_atom():
    dueling = network(num_atoms=2, dueling=True)
    with torch.no_grad():
        for layer in (dueling.advantage[-1], dueling.value[-1]):
            layer.weight.zero_()
        dueling.value[-1].bias.copy_(torch.tensor([100.0, 200.0]))
        dueling.advantage[-1].bias.copy_(torch.tensor([1.0, 10.0, 2.0, 20.0, 6.0, 60.0]))
    # V = 100 and 200; the mean advantages over actions are 3 and 30.
    assert dueling(OBS)[0].tolist() == [[98.0, 180.0], [99.0, 190.0], [103.0, 230.0]]


def test_one_hidden_layer_is_the_stream_alone():
    assert len(network(spec=replace(SPEC, hidden=(4,)), dueling=True).trunk) == 0


@pytest.mark.parametrize("dueling", [False, True])
def test_each_noisy_layer_gets_its_own_part_of_the_noise(dueling):
    noisy = network(dueling=dueling, noisy_sigma=0.5)
    layers = [layer for layer in noisy.modules() if isinstance(layer, NoisyLinear)]
    assert noisy.noise_dims == [layer.in_features + len(layer.bias) for layer in layers]
    assert sum(noisy.noise_dims) == (13 + 14 + 9) + (14 + 7 if dueling else 0)
    noise = torch.zeros(1, sum(noisy.noise_dims))
    assert torch.allclose(noisy(OBS, noise), noisy(OBS))
    begin = 0
    for layer, dim in zip(layers, noisy.noise_dims, strict=True):
        here = noise.clone()
        here[:, begin : begin + dim] = 1.0
        begin += dim
        with torch.no_grad():
            moved = [p.clone() for p in (layer.weight, layer.bias)]
            layer.weight += layer.weight_sigma  # f(1) = 1
            layer.bias += layer.bias_sigma
            wanted = noisy(OBS)
            layer.weight.copy_(moved[0])
            layer.bias.copy_(moved[1])
        assert torch.allclose(noisy(OBS, here), wanted, atol=1e-6)


def test_rows_with_noise_of_their_own_are_as_if_alone():
    noisy = network(dueling=True, num_atoms=2, noisy_sigma=0.5)
    noise = torch.randn(7, sum(noisy.noise_dims), generator=torch.Generator().manual_seed(1))
    alone = torch.cat([noisy(row, its) for row, its in zip(OBS.split(1), noise.split(1), strict=True)])
    assert torch.allclose(noisy(OBS, noise), alone, atol=1e-5)


def test_images_pass_an_encoder_without_noise():
    parts = (ObsPart(size=36 * 36, shape=(36, 36, 1), scale=1 / 255), ObsPart(size=2, shape=(2,)))
    info = replace(INFO, obs_dim=36 * 36 + 2, obs_parts=parts)
    images = network(info, noisy_sigma=0.5)
    assert images(torch.zeros(2, info.obs_dim)).shape == (2, 3, 1)
    assert not any(isinstance(layer, NoisyLinear) for layer in images.encoder.modules())
    assert any(isinstance(layer, nn.Conv2d) for layer in images.encoder.modules())
