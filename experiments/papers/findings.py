"""What of the papers holds here: each claim of the five abstracts and conclusions, beside the exhibits that show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["holds", "holds in part", "does not hold", "cannot be seen here"]


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        paper: a key of PAPERS
        claim: in the paper's terms
        verdict: here, without a GPU, on two cores
        why: one or two sentences without figures: those are the exhibits'
        shown: keys of exhibits whose values are quoted
    """

    paper: str
    claim: str
    verdict: Verdict
    why: str
    shown: tuple[str, ...] = ()


CLAIMS = (
    Claim(
        "gmi-drl", "Adaptive-grained parallelism raises training throughput, up to 2.34 times", "does not hold",
        "Two GMIs of a core and one GMI with two threads use the same two cores, and two are as fast at best: 0.80 to 0.94 "
        "of one on one machine, the same on another. GMIs gain where one process leaves its device idle, as on a large GPU; "
        "compiled rollouts leave no core idle, simulators in Python or such that wait do, and there they gain 1.55 and 1.88 "
        "times, where the model says 1.74 and 1.93 (experiments/gains). Over other libraries on the same cores training is "
        "faster, but not because of GMIs",
        ("gmi-drl_figure-3", "gmi-drl_figure-9b"),
    ),
    Claim(
        "gmi-drl", "GPU utilisation improves by up to 40.8 %", "cannot be seen here", "There is no GPU",
    ),
    Claim(
        "gmi-drl", "Simulator, agent and trainer belong into one GMI (DP-only)", "holds in part",
        "In the median DP-only is the fastest template for serving and for training. Unlike in the papers it also needs "
        "least memory, since separate roles are further processes; single layouts reverse the order",
        ("gmi-drl_figure-12",),
    ),
    Claim(
        "gmi-drl", "An analytical model chooses the template", "holds in part",
        "The papers' formulas predicted the wrong order for training. A model with more measured costs orders nearly all "
        "layouts as measurements do, and is still far off for some",
        ("gmi-drl_table-2", "gmi-drl_table-3"),
    ),
    Claim(
        "gmi-drl", "Sat and the memory projection end the search early", "holds in part",
        "The projection is accurate in the median. With few environments memory hardly grows, which makes Sat "
        "jump: the search here ends rows by other rules",
        ("gmi-drl_figure-13", "gmi-drl_figure-14"),
    ),
    Claim(
        "gmi-drl", "Composed collectives beat reductions through the host", "cannot be seen here",
        "All processes share one memory, so that the reduction through it is also what the model chooses. It is not always "
        "the fastest in training: the second-best was ahead in some cases",
        ("gmi-drl_table-6",),
    ),
    Claim(
        "gmi-drl", "Asynchronous GMIs raise PPS and TTP", "holds in part",
        "In the same direction, less: two cores have no idle simulator to fill", ("gmi-drl_figure-10",),
    ),
    Claim(
        "gmi-drl", "Scaling over nodes reaches 83 % of the ideal", "holds in part",
        "Among namespaces of one host, whose links and cores are limited: Humanoid gains as much as in the paper, and "
        "HalfCheetah, whose iterations are shorter, less; real hosts were not measured",
        ("gmi-drl_table-5",),
    ),
    Claim(
        "gmi-drl-preprint", "Multi-channel experience sharing beats one channel", "holds",
        "By at least as much as in the paper in the best case, and by little in the least one",
        ("gmi-drl-preprint_table-8",),
    ),
    Claim(
        "gmi-drl-preprint", "MPS and MIG isolate better than direct sharing", "holds in part",
        "MPS does: with four shares it is 1.7 times plain sharing. But a single process, whose rollouts are one CUDA graph, "
        "is faster than any way of sharing. MIG was not measured",
        ("gmi-drl-preprint_figure-8",),
    ),
    Claim(
        "gear", "Up to 6 times as fast as Reverb", "holds in part",
        "On one node several times as fast, not six; throughput does not grow with clients, since two cores are busy with "
        "one. A second node on the same cores is slower",
        ("gear_figure-5",),
    ),
    Claim(
        "gear", "Collection grows with the batch size", "holds",
        "From small batches to large ones; beyond memcpy by one thread, since several threads gather", ("gear_figure-6",),
    ),
    Claim(
        "gear", "GPUs select 100 to 1,000 times as fast as CPUs", "cannot be seen here",
        "There is no GPU. On the CPU a tree that is kept up to date replaces the scan: that is where selection gains here; "
        "top-k and FIFO still scan",
        ("gear_section-4.4",),
    ),
    Claim(
        "gear", "Large sequence models converge with sharded replay", "holds in part",
        "Small ones do, and the curves of one and two shards are equal to rounding; one of three offline tasks is not "
        "learned in so few steps",
        ("gear_figure-7", "gear_figure-8"),
    ),
    Claim(
        "data-collection", "Vectorisation gains up to 1,024 times over Gym", "holds in part",
        "Hundreds of times over a loop of one: there are no thousands of lanes", ("data-collection_figure-4",),
    ),
    Claim(
        "data-collection", "Compilers gain by fewer calls from Python", "holds in part",
        "Calls fall as in the paper; with many environments they cost little on a CPU",
        ("data-collection_figure-5", "data-collection_figure-6"),
    ),
    Claim(
        "data-collection", "Fusing simulation steps gains 11.3 times, more with memory-bound simulators", "holds",
        "Gains are larger with few environments, where a call costs most, and grow with the simulator's state and fall with "
        "its compute as in the paper",
        ("data-collection_figure-8", "data-collection_figure-8-gpu", "data-collection_figure-9"),
    ),
    Claim(
        "rl-scope", "The profiler's own cost can be subtracted to within 16 %", "holds",
        "Recording costs much less here to begin with, so a correction matters little", ("rl-scope_figure-11",),
    ),
    Claim(
        "rl-scope", "On-policy algorithms are at least 3.5 times as simulation-bound as off-policy ones", "holds",
        "In Stable-Baselines3 with one environment; in rayagi, whose algorithms have several, too", ("rl-scope_figure-5",),
    ),
    Claim(
        "rl-scope", "Simulation takes at least 38.1 % of the time, whatever the simulator", "does not hold",
        "Without a GPU inference and backpropagation share the cores with simulation, and take most of the time for simple "
        "tasks",
        ("rl-scope_figure-7",),
    ),
    Claim(
        "rl-scope", "GPU time is low, and nvidia-smi overstates it", "holds",
        "Where physics is on the host: with 16 processes NVML shows 99 % of 8 %, with one up to 1.6 times what is used. "
        "With physics on the GPU the GPU works for four fifths of an iteration (experiments/profiler)",
        ("rl-scope_figure-8",),
    ),
)  # fmt: skip
