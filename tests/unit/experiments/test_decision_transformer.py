"""The multi-task Decision Transformer: what a prediction depends on, and what it does not."""

from dataclasses import replace

import pytest
import torch

from experiments.replay.decision_transformer import (
    Context,
    DecisionTransformer,
    TaskSizes,
    TransformerSizes,
    action_loss,
    attention_mask,
)

TASKS = (TaskSizes(obs_dim=3, action_dim=2), TaskSizes(obs_dim=5, action_dim=1))
SIZES = TransformerSizes(units=16, layers=2, heads=2, context=4, longest_episode=50)


def context(task=0, count=3, length=4, missing=0):
    generator = torch.Generator().manual_seed(task)
    sizes = TASKS[task]
    mask = torch.ones((count, length), dtype=torch.bool)
    mask[0, :missing] = False
    return Context(
        obs=torch.randn((count, length, sizes.obs_dim), generator=generator),
        actions=torch.rand((count, length, sizes.action_dim), generator=generator) * 2 - 1,
        returns=torch.randn((count, length), generator=generator),
        steps=torch.arange(length).expand(count, length) + 7,
        mask=mask,
    )


def predicted(given, task=0):
    network = DecisionTransformer(TASKS, SIZES, seed=1)
    with torch.no_grad():
        return network({task: given})[task]


def test_an_action_depends_on_returns_and_observations_up_to_it_and_on_earlier_actions():
    given = context()
    before = predicted(given)
    for name in ("obs", "returns", "actions"):
        changed = getattr(given, name).clone()
        changed[:, 2] += 1.0
        after = predicted(replace(given, **{name: changed}))
        assert torch.equal(after[:, :2], before[:, :2])
        assert torch.equal(after[:, 2], before[:, 2]) == (name == "actions")
        assert not torch.equal(after[:, 3], before[:, 3])


def test_padding_is_not_read():
    given = context(missing=2)
    other = given.obs.clone()
    other[0, :2] = 1e6
    assert torch.equal(predicted(replace(given, obs=other))[0, 2:], predicted(given)[0, 2:])
    short = Context(
        obs=given.obs[:1, 2:], actions=given.actions[:1, 2:], returns=given.returns[:1, 2:],
        steps=given.steps[:1, 2:], mask=given.mask[:1, 2:],
    )  # fmt: skip
    torch.testing.assert_close(predicted(short)[0], predicted(given)[0, 2:], rtol=1e-4, atol=1e-6)
    assert torch.isfinite(predicted(given)).all()


def test_the_mask_by_hand():
    found = attention_mask(torch.tensor([[False, True]]))[0, 0].int().tolist()
    # Tokens 0 to 2 are padding and see themselves; 3 to 5 see the existing tokens up to themselves.
    assert found == [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1, 1],
    ]


def test_tasks_go_through_together_as_alone():
    both = {0: context(0, count=3), 1: context(1, count=2)}
    network = DecisionTransformer(TASKS, SIZES, seed=1)
    with torch.no_grad():
        together = network(both)
    for task, given in both.items():
        assert together[task].shape == given.actions.shape
        torch.testing.assert_close(together[task], predicted(given, task), rtol=1e-4, atol=1e-6)


def test_attention_by_hand():
    """One head of one block against softmax(Q K^T / sqrt(d)) V written out."""
    network = DecisionTransformer(TASKS, replace(SIZES, heads=1, layers=1), seed=2)
    block, hidden = network.blocks[0], torch.randn((1, 6, 16), generator=torch.Generator().manual_seed(3))
    allowed = attention_mask(torch.tensor([[True, True]]))
    with torch.no_grad():
        query, key, value = block.qkv(block.norms[0](hidden)).chunk(3, -1)
        scores = (query @ key.transpose(1, 2) / 4.0).masked_fill(~allowed[0], float("-inf"))
        middle = hidden + block.out(scores.softmax(-1) @ value)
        expected = middle + block.down(torch.nn.functional.gelu(block.up(block.norms[1](middle))))
        torch.testing.assert_close(block(hidden, allowed), expected)


def test_the_loss_counts_timesteps_that_exist():
    given = context(missing=3)
    guess = given.actions + torch.tensor([0.1, 0.3])
    guess[0, 0] = 100.0
    # (0.1^2 + 0.3^2) / 2 = 0.05 for every timestep that exists.
    torch.testing.assert_close(action_loss(guess, given), torch.full((3,), 0.05))


@pytest.mark.parametrize("wrong", [{"units": 0}, {"units": 10, "heads": 3}])
def test_sizes_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="must"):
        TransformerSizes(**wrong)
