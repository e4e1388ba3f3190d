"""Muon for the matrices within a drafter, AdamW for the rest, as one optimizer."""

import copy

import pytest
import torch
from torch import nn

from draftfleet.errors import SettingsError
from draftfleet.settings import Trainer
from trainer import optimizers


class Drafter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 4, bias=False)
        self.norm = nn.LayerNorm(4, bias=False)
        self.lm_head = nn.Linear(4, 9, bias=False)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)


def trained(drafter: Drafter, optimizer: optimizers.Optimizer, steps: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 6, generator=generator)
        drafter.lm_head(drafter.norm(drafter.fc(x))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach().clone() for name, weight in drafter.named_parameters()}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_groups_hold_each_trained_weight_once(name: str) -> None:
    drafter = Drafter()
    optimizer = optimizers.make(Trainer.model_validate({"optimizer": name}), drafter)

    held = [id(weight) for group in optimizer.param_groups for weight in group["params"]]

    assert sorted(held) == sorted(id(weight) for weight in drafter.parameters() if weight.requires_grad)


def test_muon_takes_the_matrices_within_and_adamw_head_and_norms_at_a_tenth_of_its_rate() -> None:
    rates = {"muon": 1e-3, "adamw": 1e-4}
    with_muon, with_adamw = (
        trained(drafter, optimizers.make(Trainer.model_validate({"optimizer": name, "lr": rate}), drafter), 1)
        for (name, rate), drafter in zip(rates.items(), (Drafter(), Drafter()), strict=True)
    )

    differing = {name for name in with_muon if not torch.equal(with_muon[name], with_adamw[name])}

    assert differing == {"fc.weight"}
    update = with_muon["fc.weight"] - Drafter().fc.weight.detach()
    singular = torch.linalg.svdvals(update)
    assert (
        singular[2] > 0.5 * singular[0]
    )  # orthogonal, about; the fourth is nothing, since the norm takes the mean away


def test_muon_decays_the_matrices_within_by_a_tenth_of_its_rate_and_nothing_else() -> None:
    drafter = Drafter()
    before = {name: weight.detach().clone() for name, weight in drafter.named_parameters()}
    optimizer = optimizers.make(Trainer.model_validate({"optimizer": "muon", "lr": 0.5}), drafter)
    for weight in drafter.parameters():
        weight.grad = torch.zeros_like(weight)

    optimizer.step()

    shares = {"fc.weight": 1 - 0.5 * 0.1}
    for name, weight in drafter.named_parameters():
        torch.testing.assert_close(weight.detach(), before[name] * shares.get(name, 1.0))


def test_a_rate_is_set_for_the_groups_by_their_shares() -> None:
    optimizer = optimizers.make(Trainer.model_validate({"optimizer": "muon"}), Drafter())

    optimizers.set_rate(optimizer, 0.02)

    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02, 0.002])


def test_it_goes_on_from_its_state_bit_for_bit() -> None:
    knobs = Trainer.model_validate({"optimizer": "muon"})
    uncut, cut = Drafter(), Drafter()
    optimizer = optimizers.make(knobs, uncut)
    trained(uncut, optimizer, 2)
    cut.load_state_dict(uncut.state_dict())
    resumed = optimizers.make(knobs, cut)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    expected, found = trained(uncut, optimizer, 3), trained(cut, resumed, 3)

    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_an_older_torch_is_told_which_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")

    with pytest.raises(SettingsError, match=r"muon needs torch 2\.9 or newer"):
        optimizers.make(Trainer.model_validate({"optimizer": "muon"}), Drafter())
