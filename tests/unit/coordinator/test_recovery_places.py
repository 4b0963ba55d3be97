"""Places of restarted GMIs whose node has left the cluster: nodes and clock are made up."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from actors.gmi import GmiIdentity, WorkerInfo
from actors.groups import GmiGroup
from actors.ping import PingMonitor
from placement import ray_groups
from placement.errors import ReservationError
from placement.plan import make_plan
from placement.ray_groups import Reservation
from placement.types import Machine, Node
from rayagi.config.spec import GmiSpec
from rayagi.coordinator import recovery as module
from rayagi.coordinator.pending_calls import PendingCalls
from rayagi.coordinator.recovery import Recovery


def node(name, ray_node_id, cores):
    return Node(name=name, cores=tuple(cores), memory_total_bytes=2**30, ray_node_id=ray_node_id)


def worker(index, node_id):
    return WorkerInfo(index=index, node_id=node_id, hostname="", pid=1, cores=(), num_threads=1, gpu_ids=())


class Handle:
    """A GMI that never answers."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, method):
        def remote(*arguments, **options):
            self.asked.append((method, *arguments))
            return object()

        return SimpleNamespace(remote=remote)


@pytest.fixture
def world(monkeypatch):
    """A decoupled run on two nodes, none of whose bundles is on a node any more."""
    world = SimpleNamespace(now_s=1.0, moved=[], restarted=[], alive={"ida", "idb"})
    plan = make_plan(
        Machine(nodes=(node("a", "ida", range(2)), node("b", "idb", range(2, 4))), origin="ray"),
        backend="cpu",
        template="decoupled",
        num_envs=1,
    )

    def move(reservation, plan, index):
        world.moved.append(index)
        reservation.moved[index] = None

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: world.now_s))
    monkeypatch.setattr(module, "is_placed", lambda reservation, index: False)
    monkeypatch.setattr(module, "is_alive", lambda node_id: node_id in world.alive)
    monkeypatch.setattr(module, "move", move)
    monkeypatch.setattr(module, "restart", lambda group, index, *where: world.restarted.append(index))
    monkeypatch.setattr(ray_groups, "_live_nodes", list)
    identities = [
        GmiIdentity(index=index, num_gmis=plan.num_gmis, slice=own, roles=plan.roles_of(index), task="Point")
        for index, own in enumerate(plan.slices)
    ]
    group = GmiGroup(identities, [Handle() for _ in identities], None, PingMonitor(60.0))
    bundles = tuple(range(plan.num_gmis))
    world.reservation = Reservation(group=None, bundle_node_ids=("",) * plan.num_gmis, bundles=bundles)
    world.group = group
    world.workers = [
        worker(index, "ida" if own.node == "a" else "idb") for index, own in enumerate(plan.slices)
    ]

    def recovery(**changes):
        return Recovery(
            spec=SimpleNamespace(gmi=GmiSpec(reserve_timeout_s=10.0)),
            plan=replace(plan, **changes),
            deployment=SimpleNamespace(group=group, reservation=world.reservation, workers=world.workers),
            pending_calls=PendingCalls(group, 60.0),
            factory=None,
            log=lambda text: None,
        )

    world.recovery = recovery
    return world


def test_a_gmi_whose_node_is_gone_is_moved_once_and_its_place_awaited_as_a_reservation_is(world):
    recovery = world.recovery()
    recovery.restart_lost(RuntimeError("lost"), 0)
    assert (world.restarted, world.moved) == ([0], [])
    recovery.find_places()
    assert (world.restarted, world.moved) == ([0, 0], [0])
    world.now_s = 11.0
    recovery.find_places()
    assert (world.restarted, world.moved) == ([0, 0], [0])
    world.now_s = 11.1
    with pytest.raises(
        ReservationError, match=r"another place for GMI 0/\d .*, whose node has left the cluster"
    ):
        recovery.find_places()


@pytest.mark.parametrize("why", ["Ray moves a trial's bundles", "the new node's GPU is not partitioned"])
def test_a_gmi_that_cannot_be_moved_is_waited_for_where_it_was(world, why):
    recovery = world.recovery(backend="mps" if "GPU" in why else "cpu")
    if "trial" in why:
        recovery._deployment.reservation = replace(world.reservation, owned=False)
    recovery.restart_lost(RuntimeError("lost"), 0)
    recovery.find_places()
    assert (world.restarted, world.moved) == ([0], [])


def test_a_gmi_enters_a_slice_of_the_node_that_it_is_on_and_is_called_by_it(world):
    recovery = world.recovery()
    before = recovery.plan
    for node_id, name, cores in (("ida", "a", before.slices[0].cores), ("idb", "b", ())):
        recovery.restart_lost(RuntimeError("lost"), 0)
        assert recovery.is_starting(0)
        recovery.build(0, worker(0, node_id))
        assert not recovery.is_starting(0)
        own = recovery.plan.slices[0]
        assert (own.node, own.cores) == (name, cores)
        assert world.group.identities[0].slice == own
        assert ("enter", own) in world.group.handles[0].asked
        recovery.record_progress(0, [SimpleNamespace(iteration=0, metrics={"env_steps": 1.0})])
    assert recovery.plan.slices[1:] == before.slices[1:]


def test_a_node_that_has_joined_since_is_read_and_one_of_a_host_that_is_back_has_a_name_of_its_own(
    world, monkeypatch
):
    back = Machine(nodes=(node("a", "idc0123456789", range(2)), node("b", "idb", range(2, 4))), origin="ray")
    monkeypatch.setattr(module, "cluster_machine", lambda timeout_s: back)
    recovery = world.recovery()
    recovery.restart_lost(RuntimeError("lost"), 0)
    recovery.build(0, worker(0, "idc0123456789"))
    assert recovery.plan.slices[0].node == "a-idc012"
    assert [each.name for each in recovery.plan.machine.nodes] == ["a", "b", "a-idc012"]
    assert recovery.plan.machine.node("a").ray_node_id == "ida"


def lost_until_it_is_final(recovery, index):
    """How many further losses of a GMI without progress the run survives."""
    for survived in range(10):
        try:
            recovery.restart_lost(RuntimeError("lost"), index)
        except RuntimeError:
            return survived
    raise AssertionError("it is restarted for ever")


def test_a_node_that_is_lost_takes_one_of_three_restarts_though_the_successor_is_lost_with_it(world):
    recovery = world.recovery()
    recovery.restart_lost(RuntimeError("the process ended"), 0)
    world.alive.remove("ida")
    recovery.restart_lost(RuntimeError("its node ended"), 0)
    recovery.build(0, worker(0, "idb"))
    assert lost_until_it_is_final(recovery, 0) == 2


def test_learners_of_a_lost_node_count_one_loss_in_all(world):
    """The learners of node b: the loss of one restarts both there, and the other's successor is lost, too."""
    plan = world.recovery().plan
    recovery = world.recovery(worker_types=(*[plan.worker_types[0]] * 3, ("trainer",), ("trainer",)))
    first, second = recovery.learners
    recovery._states = lambda indices: []
    recovery._snapshot = {"iteration": 0}
    assert {world.workers[index].node_id for index in recovery.learners} == {"idb"}
    recovery.restart_lost(RuntimeError("the process ended"), first)
    world.alive.remove("idb")
    recovery.restart_lost(RuntimeError("its node ended"), second)
    for index in recovery.learners:
        recovery.build(index, worker(index, "ida"))
    assert lost_until_it_is_final(recovery, first) == 2


def test_processes_that_end_on_a_node_that_lives_count_each(world):
    assert lost_until_it_is_final(world.recovery(), 0) == 3


def test_a_gmi_that_takes_node_after_node_with_it_is_given_up(world):
    recovery = world.recovery()
    world.alive.clear()
    assert lost_until_it_is_final(recovery, 0) <= 6
