"""Errors of the roles. Each pickles by its fields, so that Ray delivers it as the same class."""

from __future__ import annotations

from collectives.experience.errors import ChannelError


class NonFiniteError(RuntimeError):
    """NaN or infinity in an observation, a reward, a loss or a gradient. Training stops.

    ``iteration`` counts from 1, as in the progress output and the CSV.
    """

    def __init__(self, quantity: str, iteration: int, where: str) -> None:
        super().__init__(quantity, iteration, where)
        self.quantity, self.iteration, self.where = quantity, iteration, where

    def __str__(self) -> str:
        return (
            f"{self.quantity} became NaN or infinite in iteration {self.iteration} ({self.where}); training stopped. "
            "A lower learning_rate, max_grad_norm or initial_log_std often helps; "
            "if an observation or reward caused it, check the environment"
        )


class PartnerLostError(ChannelError):
    """A GMI that this one exchanges steps with has ended, or has left after an error."""

    def __init__(self, channel: str, partner: str, asked: str, has_ended: bool) -> None:
        how = "its process has ended" if has_ended else "it has left"
        super().__init__(channel, f"{partner} was lost while this GMI waited for {asked}: {how}")
        self.args = (channel, partner, asked, has_ended)  # constructor arguments for unpickling
        self.partner, self.asked = partner, asked
        self.has_ended = has_ended
        """Whether its process was seen to end; else it left after an error."""


class IterationMismatchError(RuntimeError):
    """Two GMIs that exchange steps are in different iterations."""

    def __init__(self, partner: str, theirs: int, own: int) -> None:
        super().__init__(partner, theirs, own)
        self.partner, self.theirs, self.own = partner, theirs, own

    def __str__(self) -> str:
        return (
            f"{self.partner} is in iteration {self.theirs} where this GMI is in iteration {self.own}: "
            "load one checkpoint into all GMIs"
        )


class GmiLostError(RuntimeError):
    """A GMI's process or node ended during a call."""

    def __init__(self, index: int, gmi: str, asked: str, known: str) -> None:
        super().__init__(index, gmi, asked, known)
        self.index, self.gmi, self.asked, self.known = index, gmi, asked, known

    @property
    def loss(self) -> str:
        """What was lost, when, and how it is known, for where the run goes on."""
        return f"{self.gmi} was lost during {self.asked}: {self.known}"

    def __str__(self) -> str:
        return f"{self.loss}. If memory ran out, lower num_envs or num_gmis"


class ProgramInterruptedError(RuntimeError):
    """A program raised KeyboardInterrupt in a GMI, where nobody presses Ctrl-C. Ray would call it a cancelled task."""

    def __init__(self, gmi: str, code_position: str) -> None:
        super().__init__(gmi, code_position)
        self.gmi, self.code_position = gmi, code_position

    def __str__(self) -> str:
        return (
            f"{self.gmi}: KeyboardInterrupt at {self.code_position}: this code raised it, or somebody sent SIGINT to the "
            "GMI's process"
        )


class GmiSilentError(RuntimeError):
    """A GMI is alive but did not answer in time."""

    def __init__(self, gmi: str, asked: str, waited_s: float, code_position: str = "") -> None:
        super().__init__(gmi, asked, waited_s, code_position)
        self.gmi, self.asked, self.waited_s = gmi, asked, waited_s
        self.code_position = code_position
        """``FILE:LINE in FUNCTION`` where its program was; empty if that is not known."""

    def __str__(self) -> str:
        at = f"; its program was at {self.code_position}" if self.code_position else ""
        return f"{self.gmi} did not answer within {self.waited_s:.0f} s; the call was: {self.asked}{at}"


class ObjectStoreError(RuntimeError):
    """A GMI's answer has no room in Ray's object store, which is shared with other programs, nor on the disk."""

    def __init__(self, gmi: str, asked: str) -> None:
        super().__init__(gmi, asked)
        self.gmi, self.asked = gmi, asked

    def __str__(self) -> str:
        return (
            f"{self.gmi} cannot answer the call for {self.asked}: Ray's object store on its node is full, and so is the "
            "disk that takes what does not fit. `ray memory` shows whose objects these are; end that program, or free disk "
            "space under Ray's temporary folder"
        )
