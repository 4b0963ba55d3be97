"""Every table and figure with results of the five papers: what it shows, what measures it here, and what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from experiments.allreduce import ring
from experiments.gpu_sharing import run as gpu_sharing
from experiments.learning import compare as learning
from experiments.nodes import run as nodes
from experiments.papers import readings, rl_scope
from experiments.papers.rows import newest
from experiments.profiler import cores, gpu

ROOT = Path(__file__).parents[1]
PAPERS = {
    "gmi-drl": "GMI-DRL (ATC 2025)",
    "gmi-drl-preprint": "GMI-DRL, preprint (arXiv 2022)",
    "gear": "GEAR (ICML 2023)",
    "data-collection": "Optimizing data collection (MLBench 2022)",
    "rl-scope": "RL-Scope (MLSys 2021)",
}
Axes = Literal["same", "partly", "none"]


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """The experiment that measures an exhibit.

    Attributes:
        full: arguments of ``python -m``; {out}, {peers} and {data} are folders
        quick: the same with few points and repeats
        minutes: how long the quick and the full one take on two cores
        rows: pattern of its result files, in the folder ``experiments/`` of ``folder``
        folder: where the full one writes
        accepts: whether a file that matches is of this experiment, by its content
    """

    full: str
    quick: str
    minutes: tuple[float, float]
    folder: str
    rows: str
    accepts: Callable[[Any], bool] = lambda rows: True


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One table or figure.

    Attributes:
        paper: a key of PAPERS
        label: such as ``Figure 12``
        quantity: what it shows
        theirs: the paper's headline
        axes: whether what is drawn here has the paper's axes; none: nothing is measured
        differs: how the measurement here differs, or why there is none
        measuring: None where nothing measures it
        ours: the headline, from rows
        draw: from rows; None for a table
        needs: a GPU, in words; without one nothing runs, and rows that are committed are shown all the same
        picture: name of the figure that the experiment itself draws beside its rows, instead of one in ``results``
    """

    paper: str
    label: str
    quantity: str
    theirs: str
    axes: Axes
    differs: str
    measuring: Measuring | None = None
    ours: Callable[[Any], str] | None = None
    draw: Callable[[Any, Path], None] | None = None
    needs: str = ""
    picture: str = ""

    @property
    def key(self) -> str:
        """As in file names: ``gmi-drl_figure-12``."""
        return f"{self.paper}_{self.label.lower().replace(' ', '-')}"

    @property
    def number(self) -> str:
        """As --figure takes it: ``12``, ``9a``, ``T5``, ``4.4``."""
        kind, number = self.label.split()
        return {"Figure": "", "Table": "T", "Section": ""}[kind] + number

    def committed(self) -> Path | None:
        """The newest rows that are committed; None: it is not measured."""
        measuring = self.measuring
        if measuring is None:
            return None
        return newest(ROOT / measuring.folder, measuring.rows, measuring.accepts)


GRID = Measuring(
    full="experiments.search.run --name papers --repeats 5",
    quick="experiments.search.run --name quick --tasks Ant-v5 --repeats 1 --train-seconds 3 --out {out}",
    minutes=(8, 150),
    folder="search/results",
    rows="*.jsonl",
)
TEMPLATES = Measuring(
    full="experiments.mapping.run",
    quick="experiments.mapping.run --kinds serving ppo --num-envs 16 --seconds 1 --out {out}",
    minutes=(4, 11),
    folder="mapping/results",
    rows="mapping_*.json",
    accepts=lambda rows: "case" in rows["rows"][0],
)
TURNS = Measuring(
    full="experiments.throughput.run --tasks all --peers {peers} --repeats 3 --seconds 8",
    quick="experiments.throughput.run --peers {peers} --repeats 1 --seconds 4 --out {out}",
    minutes=(3, 60),
    folder="throughput/results",
    rows="tasks_*.json",
    accepts=lambda rows: {"sf-async", "cleanrl"} <= {row.get("peer") for row in rows["rows"]},
)
LAYOUTS = replace(
    TURNS, accepts=lambda rows: any(row.get("peer") == "cleanrl" and row["repeat"] for row in rows["rows"])
)
"""Two GMIs and one with two threads: repeats matter, the peers do not."""
_RLLIB = "experiments.throughput.run --cases rayagi-2x1 rayagi-1x2 rllib --tasks Ant-v5 Humanoid-v5"
RLLIB = Measuring(
    full=f"{_RLLIB} --repeats 3 --seconds 10",
    quick=f"{_RLLIB} --repeats 1 --seconds 4 --out {{out}}",
    minutes=(2, 8),
    folder="throughput/results",
    rows="tasks_*.json",
    accepts=lambda rows: any(row.get("peer") == "rllib" for row in rows["rows"]),
)
ASYNCHRONOUS = Measuring(
    full="experiments.asynchronous.run Ant-v5",
    quick="experiments.asynchronous.run Ant-v5 --repeats 1 --seconds 5 --time 20s --out {out}",
    minutes=(3, 30),
    folder="asynchronous/results",
    rows="Ant-v5.json",
)
COMPOSITIONS = Measuring(
    full="experiments.allreduce.training",
    quick="experiments.allreduce.training --repeats 1 --layouts 2G2T 2G3T --out {out}",
    minutes=(8, 45),
    folder="allreduce/results",
    rows="training_*.json",
)
CHANNELS = Measuring(
    full="experiments.channels_table8.run",
    quick="experiments.channels_table8.run --repeats 1 --seconds 1 --out {out}",
    minutes=(2, 20),
    folder="channels_table8/results",
    rows="table8_*.json",
)
LEARNING = Measuring(
    full="experiments.learning.compare HalfCheetah-v5 Ant-v5 Walker2d-v5 Hopper-v5 Humanoid-v5 HumanoidStandup-v5 "
    "--peers {peers} --time 90",
    quick="experiments.learning.compare HalfCheetah-v5 --peers {peers} --seeds 0 --time 20 --out {out}/beside.json",
    minutes=(3, 130),
    folder="learning/results",
    rows="beside.json",
)


def _replay(figure: str, quick: str) -> Measuring:
    reverb = " --reverb {peers}/reverb/bin/python" if figure == "throughput" else ""
    return Measuring(
        full=f"experiments.replay.figures {figure}{reverb} --write",
        quick=f"experiments.replay.figures {figure}{reverb} --repeats 1 --seconds 0.5 {quick} --write --out {{out}}",
        minutes=(3, 10),
        folder="replay/results",
        rows=f"figure_{figure}_*.json",
    )


NODES = Measuring(
    full="experiments.nodes.run",
    quick="experiments.nodes.run --tasks HalfCheetah-v5 --nodes 1 2 --megabits 1000 --repeats 1 --seconds 5 --out {out}",
    minutes=(3, 18),
    folder="nodes/results",
    rows="nodes.json",
)
FUSION = Measuring(
    full="experiments.fusion.run",
    quick="experiments.fusion.run --quick --out {out}",
    minutes=(3, 40),
    folder="fusion/results",
    rows="measurements.jsonl",
)
FUSION_ON_GPU = Measuring(
    full="experiments.fusion.run --figure gpu --out experiments/fusion/results/gpu",
    quick="experiments.fusion.run --figure gpu --quick --out {out}",
    minutes=(1, 4),
    folder="fusion/results/gpu",
    rows="measurements.jsonl",
)
SURVEY = Measuring(
    full="experiments.profiler.survey --peers {peers}",
    quick="experiments.profiler.survey --peers {peers} --figures 5 --out {out}",
    minutes=(5, 12),
    folder="profiler/results",
    rows="survey.json",
)
OVERHEAD = Measuring(
    full="experiments.profiler.run --peers {peers} --repetitions 6",
    quick="experiments.profiler.run --peers {peers} --programs rayagi-ppo sb3-ppo --repetitions 2 --out {out}/overhead.json",
    minutes=(6, 45),
    folder="profiler/results",
    rows="overhead.json",
)
CORE_USE = Measuring(
    full="experiments.profiler.cores",
    quick="experiments.profiler.cores --tasks Ant-v5 --iterations 3 --out {out}",
    minutes=(0.5, 1),
    folder="profiler/results",
    rows="cores.json",
)
RING = Measuring(
    full="experiments.allreduce.ring",
    quick="experiments.allreduce.ring --tasks Ant-v5 --repeats 1 --seconds 4 --out {out}",
    minutes=(1, 12),
    folder="allreduce/results",
    rows="ring.json",
)
GPU_SHARING = Measuring(
    full="experiments.gpu_sharing.run",
    quick="experiments.gpu_sharing.run --tasks Ant-v5 --shares 1 2 --repeats 1 --seconds 4 --out {out}",
    minutes=(2, 40),
    folder="gpu_sharing/results",
    rows="*.json",
)


def _on_gpu(what: str) -> Measuring:
    command = f"experiments.profiler.gpu {what}"
    return Measuring(
        full=command,
        quick=f"{command} --out {{out}}",
        minutes=(2, 2),
        folder="profiler/results",
        rows=f"gpu_{what}.json",
    )


CORES = "no GPU: GMIs are cores, the simulator is MuJoCo on the CPU"
NO_GPU = "needs a GPU"

GMI_DRL = (
    Exhibit(
        paper="gmi-drl", label="Figure 1b", quantity="GPU utilisation over the phases of PPO",
        theirs="intermittent, and far from the whole GPU", axes="partly", measuring=CORE_USE,
        ours=lambda rows: cores.headline(rows["rows"]), draw=lambda rows, path: cores.draw(rows["rows"], path),
        differs=f"{CORES}; CPU time over that of all cores; of a GPU: `python -m experiments.profiler.gpu phases`",
    ),
    Exhibit(
        paper="gmi-drl", label="Figure 2", quantity="throughput and utilisation against the number of environments",
        theirs="rises in proportion, then falls (Anymal beyond 16,384)", axes="partly", measuring=GRID,
        ours=readings.throughput_by_envs, draw=readings.draw_throughput_by_envs,
        differs=f"{CORES}; no utilisation; one GMI with all cores",
    ),
    Exhibit(
        paper="gmi-drl", label="Figure 3", quantity="one large GMI (fine-grained) against several (adaptive-grained)",
        theirs="adaptive is faster on Humanoid", axes="partly", measuring=LAYOUTS,
        ours=readings.several_over_one, draw=readings.draw_several_over_one,
        differs=f"{CORES}; two GMIs of a core against one with two threads",
    ),
    Exhibit(
        paper="gmi-drl", label="Figure 9a", quantity="serving throughput over one process per GPU",
        theirs="2.08 times on average, 2.62 at most", axes="partly", measuring=TEMPLATES,
        ours=readings.serving_by_gmis, draw=readings.draw_serving_by_gmis,
        differs=f"{CORES}; two GMIs of a core over one GMI of a core, so the ideal is 2",
    ),
    Exhibit(
        paper="gmi-drl", label="Figure 9b", quantity="synchronous training over Isaac Gym with NCCL",
        theirs="1.69 times on average, 2.07 at most", axes="partly", measuring=TURNS,
        ours=readings.over_peers, draw=readings.draw_over_peers,
        differs=f"{CORES}; instead of Isaac Gym the fastest of five PPO libraries on the same cores, with its settings",
    ),
    Exhibit(
        paper="gmi-drl", label="Figure 9c", quantity="the same with Horovod",
        theirs="1.72 times on average, 2.34 at most", axes="partly", measuring=RING,
        ours=lambda rows: ring.headline(rows["rows"]), draw=lambda rows, path: ring.draw(rows["rows"], path),
        differs=f"{CORES}; over the same two GMIs with a ring of Gloo, which is what Horovod does without NCCL; Horovod "
        "itself is no longer built for current torch",
    ),
    Exhibit(
        paper="gmi-drl", label="Figure 10",
        quantity="asynchronous training: predictions and training samples per second (PPS, TTP)",
        theirs="1.88 times PPS, 1.65 times TTP on average", axes="partly", measuring=ASYNCHRONOUS,
        ours=readings.asynchronous, draw=readings.draw_asynchronous,
        differs=f"{CORES}; APPO with a collector and a learner of a core each over APPO in which each core does both",
    ),
    Exhibit(
        paper="gmi-drl", label="Figure 11", quantity="training throughput over Ray RLlib's PPO on Gym's tasks",
        theirs="up to 1.62 times", axes="partly", measuring=RLLIB,
        ours=readings.over_rllib, draw=readings.draw_over_rllib,
        differs=f"{CORES}; RLlib with two remote env runners and PPO's settings in common",
    ),
    Exhibit(
        paper="gmi-drl", label="Figure 12", quantity="templates: throughput and memory",
        theirs="DP-only over MP-DP in serving 2.10 for 9.5 % more memory; over DP-MP in training 3.88 for 6.5 %",
        axes="partly", measuring=TEMPLATES, ours=readings.templates, draw=readings.draw_templates,
        differs=f"{CORES}",
    ),
    Exhibit(
        paper="gmi-drl", label="Figure 13", quantity="Sat against the number of environments",
        theirs="falls with more environments; Humanoid is saturated at 32,768", axes="same", measuring=GRID,
        ours=readings.saturation, draw=readings.draw_saturation,
        differs=f"{CORES}; with few environments memory hardly grows, so Sat is large or noise",
    ),
    Exhibit(
        paper="gmi-drl", label="Figure 14", quantity="memory by eq. 4 and measured",
        theirs="minor deviation", axes="same", measuring=GRID,
        ours=readings.projection, draw=readings.draw_projection, differs=f"{CORES}; resident memory of the process",
    ),
    Exhibit(
        paper="gmi-drl", label="Table 2", quantity="serving: predicted costs of the templates",
        theirs="DP-only moves nothing between GMIs: predicted and measured fastest", axes="partly", measuring=TEMPLATES,
        ours=partial(readings.predictions, serving=True),
        differs="a throughput model with measured unit costs, since the table's formulas were wrong here",
    ),
    Exhibit(
        paper="gmi-drl", label="Table 3", quantity="synchronous training: predicted costs of the templates",
        theirs="DP-only reduces only gradients: predicted and measured fastest", axes="partly", measuring=TEMPLATES,
        ours=partial(readings.predictions, serving=False),
        differs="a throughput model with measured unit costs, since the table's formulas were wrong here",
    ),
    Exhibit(
        paper="gmi-drl", label="Table 5", quantity="several nodes over one",
        theirs="4 nodes over one 2.72 to 3.28, 83 % of linear on average", axes="partly", measuring=NODES,
        ours=lambda rows: nodes.headline(rows["rows"]), draw=lambda rows, path: nodes.draw(rows["rows"], path),
        differs=f"{CORES}; HalfCheetah and Humanoid; nodes are namespaces of one host, with 0.4 of a core and 1 Gbit/s each",
    ),
    Exhibit(
        paper="gmi-drl", label="Table 6", quantity="training throughput of the chosen collective over IP only",
        theirs="1.001 to 1.025", axes="partly", measuring=COMPOSITIONS,
        ours=partial(readings.compositions, layouts=("2G3T", "4G3T")), draw=readings.draw_compositions,
        differs=f"{CORES}, GPUs are labels: all share the same memory, so IP only is the choice, and the ratio is 1",
    ),
)  # fmt: skip
PREPRINT = (
    Exhibit(
        paper="gmi-drl-preprint", label="Figure 7", quantity="serving and training over one process per GPU",
        theirs="serving 2.08, training 1.86 (NCCL) times on average", axes="partly", measuring=TEMPLATES,
        ours=readings.serving_by_gmis, draw=readings.draw_serving_by_gmis,
        differs="as figure 9 of the later version, of which it is the same experiment",
    ),
    Exhibit(
        paper="gmi-drl-preprint", label="Figure 8", quantity="MPS and MIG over direct sharing of a GPU",
        theirs="both faster; MIG ahead on complex tasks", axes="partly", measuring=GPU_SHARING, needs=NO_GPU,
        ours=lambda rows: gpu_sharing.headline(rows["runs"]), draw=lambda rows, path: gpu_sharing.draw(rows["runs"], path),
        differs="one process's rollouts and updates are one CUDA graph each, which leave little of the GPU idle; MIG's mode "
        "is not changed",
    ),
    Exhibit(
        paper="gmi-drl-preprint", label="Figure 9", quantity="reward against seconds",
        theirs="higher reward after the same time, on three tasks", axes="partly", measuring=LEARNING,
        ours=readings.learning, draw=learning.draw,
        differs=f"{CORES}; two GMIs, one process with two threads, Stable-Baselines3 and CleanRL with their users' settings",
    ),
    Exhibit(
        paper="gmi-drl-preprint", label="Figure 10", quantity="throughput and memory against the number of environments",
        theirs="throughput flattens where memory rises steeply", axes="same", measuring=GRID,
        ours=readings.throughput_by_envs, draw=readings.draw_memory_by_envs, differs=f"{CORES}",
    ),
    Exhibit(
        paper="gmi-drl-preprint", label="Figure 11", quantity="asynchronous training: PPS and TTP",
        theirs="1.88 times PPS, 1.65 times TTP on average", axes="partly", measuring=ASYNCHRONOUS,
        ours=readings.asynchronous, draw=readings.draw_asynchronous,
        differs="as figure 10 of the later version",
    ),
    Exhibit(
        paper="gmi-drl-preprint", label="Table 7", quantity="layer-aware gradient reduction over multi-process reduction",
        theirs="1.03 to 1.25", axes="partly", measuring=COMPOSITIONS,
        ours=partial(readings.compositions, layouts=("2G2T", "2G3T", "4G4T")), draw=readings.draw_compositions,
        differs=f"{CORES}, GPUs are labels: IP only is the choice, and the ratio is 1",
    ),
    Exhibit(
        paper="gmi-drl-preprint", label="Table 8", quantity="multi-channel over uni-channel experience sharing",
        theirs="PPS 1.04 to 1.06, TTP 1.13 to 1.25 with two GPUs", axes="same", measuring=CHANNELS,
        ours=readings.channels, draw=readings.draw_channels,
        differs="processes on one host; simulators without physics, so that sharing is not hidden",
    ),
)  # fmt: skip
GEAR = (
    Exhibit(
        paper="gear", label="Figure 5", quantity="throughput of trajectories against clients, beside Reverb",
        theirs="17.1 GB/s with 8 clients on a node, Reverb 6.7 at most; 29.1 on two nodes", axes="same",
        measuring=_replay("throughput", "--clients 1 2 4"), ours=readings.replay_clients,
        draw=readings.draw_replay_clients, differs="two cores; the second node is a process on the same cores, over TCP",
    ),
    Exhibit(
        paper="gear", label="Figure 6", quantity="throughput of collection against batch size",
        theirs="8 GB/s with 32, 36 GB/s with 1,024", axes="same", measuring=_replay("batch", "--batches 32 256 1024"),
        ours=readings.replay_batches, draw=readings.draw_replay_batches, differs="memory of the host to memory of the host",
    ),
    Exhibit(
        paper="gear", label="Figure 7", quantity="convergence of a Gato-like model, offline",
        theirs="Hopper reaches a return of 3,000", axes="partly",
        measuring=Measuring(
            full="experiments.replay.multi_task_dt --data {data} --steps 300 --evaluate-every 100 --write",
            quick="experiments.replay.multi_task_dt --data {data} --steps 60 --evaluate-every 30 --write --out {out}",
            minutes=(5, 20), folder="replay/results", rows="*-multi-task-dt.json",
        ),
        ours=readings.gato, draw=readings.draw_gato,
        differs="a Decision Transformer of three tasks, thousands of times smaller, for 300 steps",
    ),
    Exhibit(
        paper="gear", label="Figure 8", quantity="convergence of a Multi-Agent Transformer, on line",
        theirs="StarCraft II: returns of 20", axes="partly",
        measuring=Measuring(
            full="experiments.replay.mat_half_cheetah --updates 80 --out experiments/replay/results/mat-1x1.json",
            quick="experiments.replay.mat_half_cheetah --updates 3 --evaluate-every 3 --out {out}/mat-1x1.json",
            minutes=(3, 60), folder="replay/results", rows="*mat-1x1.json",
        ),
        ours=readings.mat, draw=readings.draw_mat, differs="HalfCheetah as a team of two legs; one seed",
    ),
    Exhibit(
        paper="gear", label="Section 4.4", quantity="time of a selection against table size",
        theirs="GPU sampling 100 to 1,000 times as fast as Reverb's", axes="partly",
        measuring=_replay("selection", "--sizes 10000 1000000"), ours=readings.selection, draw=readings.draw_selection,
        differs="compiled code on the CPU, with a tree kept up to date; Reverb's selection alone cannot be timed",
    ),
)  # fmt: skip


def _fused(number: str, quantity: str, theirs: str, differs: str) -> Exhibit:
    return Exhibit(
        paper="data-collection",
        label=f"Figure {number}",
        quantity=quantity,
        theirs=theirs,
        axes="partly" if number in ("2", "5") else "same",
        measuring=FUSION,
        ours=partial(readings.fusion, number),
        draw=partial(readings.draw_fusion, number),
        differs=differs,
        picture=f"figure_{number}.png",
    )


DEVICE = "the device is the CPU"
DATA_COLLECTION = (
    _fused(
        "2", "simulation throughput of several simulators", "CartPole is like robotics simulators",
        f"this project's simulators beside Brax's Ant on two of its engines; {DEVICE}",
    ),
    _fused("4", "data collection against parallel environments", "up to 1,024 times Gym's loop", DEVICE),
    _fused(
        "5", "time in Python, backend and device against steps per call", "53.8 times from 1 to 1,000 steps per call",
        f"parts separated by leaving parts out; {DEVICE}",
    ),
    _fused("6", "calls and kernels per step", "XLA: one call per K steps", DEVICE),
    _fused("8", "simulation throughput against fused steps", "11.3 times by fusion", DEVICE),
    Exhibit(
        paper="data-collection", label="Figure 8-GPU", quantity="simulation throughput against fused steps",
        theirs="11.3 times by fusion", axes="same", measuring=FUSION_ON_GPU, needs=NO_GPU,
        ours=partial(readings.fusion, "gpu"), draw=partial(readings.draw_fusion, "gpu"),
        differs="kernels in Warp and in printed CUDA instead of the authors'; up to 65,536 environments",
        picture="figure_gpu.png",
    ),
    _fused("9", "gain of fusion against state and compute", "grows with state, falls with compute", DEVICE),
)  # fmt: skip
RL_SCOPE = (
    *(
        Exhibit(
            paper="rl-scope", label=f"Figure {number}", quantity=quantity, theirs=theirs, axes="partly",
            measuring=SURVEY, ours=ours, draw=partial(rl_scope.draw_figure, number), differs=differs,
        )
        for number, quantity, theirs, ours, differs in (
            (4, "time by framework, stage and level of the stack",
             "at most 14 % on the GPU; TensorFlow eager 4.8 times as long as graphs", rl_scope.frameworks,
             "no GPU; SAC and PPO of six libraries, all on torch, instead of TD3 and DDPG on two backends"),
            (5, "time by algorithm", "on-policy at least 3.5 times as simulation-bound as off-policy", rl_scope.algorithms,
             "no GPU; Stable-Baselines3, the successor of the paper's; one thread"),
            (7, "time by simulator", "simulation takes at least 38.1 %", rl_scope.simulators,
             "no GPU; Gymnasium's tasks; neither Atari nor a game engine"),
        )
    ),
    Exhibit(
        paper="rl-scope", label="Figure 8", quantity="true GPU time beside what nvidia-smi calls utilisation",
        theirs="100 % shown, 0.4 % used", axes="partly", needs=NO_GPU, measuring=_on_gpu("workers"),
        ours=lambda rows: gpu.workers_headline(rows["rows"]), draw=lambda rows, path: gpu.draw_workers(rows["rows"], path),
        differs="processes that collect experience of HalfCheetah-v5 instead of Minigo's self-play; NVML's mean over the "
        "run instead of nvidia-smi's reading",
    ),
    Exhibit(
        paper="rl-scope", label="Figure 9", quantity="calibration: cost of an event by differences of runs",
        theirs="one cost per kind of hook", axes="same", measuring=OVERHEAD, ours=rl_scope.costs,
        draw=rl_scope.draw_costs, differs="hooks of Python and native calls; no CUDA API",
    ),
    Exhibit(
        paper="rl-scope", label="Figure 10", quantity="calibration of each CUDA call", theirs="launch 3 us, copy 1 us",
        axes="same", needs=NO_GPU, measuring=_on_gpu("calls"),
        ours=lambda rows: gpu.calls_headline(rows["rows"]), draw=lambda rows, path: gpu.draw_calls(rows["rows"], path),
        differs="by torch.profiler, which uses CUPTI as the paper does; CPU time of the calls",
    ),
    Exhibit(
        paper="rl-scope", label="Figure 11", quantity="corrected against uninstrumented time",
        theirs="within 16 %; uncorrected 1.8 times too long on average", axes="same", measuring=OVERHEAD,
        ours=rl_scope.bias, draw=rl_scope.draw_bias, differs="CPU time of iterations, instead of a run's wall time",
    ),
)  # fmt: skip
EXHIBITS = (*GMI_DRL, *PREPRINT, *GEAR, *DATA_COLLECTION, *RL_SCOPE)
