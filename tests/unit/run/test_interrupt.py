import os
import signal
import subprocess
import sys
import threading

import pytest

from rayagi.run.interrupt import EarlyEnd, Interrupt
from tests.programs import run_python

pytestmark = pytest.mark.usefixtures("default_signals")


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGINT, "Ctrl-C"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGHUP, "SIGHUP, as its terminal closed"),
    ],
)
def test_the_first_signal_requests_the_end_and_is_named(number, reason):
    calls = []
    before = signal.getsignal(number)
    with Interrupt(lambda: calls.append(1)) as interrupt:
        assert (interrupt.requested, interrupt.reason) == (False, "")
        send(number)
    assert (interrupt.requested, interrupt.reason, calls) == (True, reason, [1])
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("further", [signal.SIGTERM, signal.SIGHUP])
def test_only_ctrl_c_ends_at_once(further):
    with Interrupt() as interrupt:
        send(signal.SIGHUP)
        send(further)
        assert interrupt.reason == "SIGHUP, as its terminal closed"
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_a_shell_ignores_in_the_background_stays_ignored_and_sigterm_ends(number):
    signal.signal(number, signal.SIG_IGN)
    with Interrupt() as interrupt:
        send(number)
        assert not interrupt.requested
        send(signal.SIGTERM)
    assert interrupt.reason == "SIGTERM"
    assert signal.getsignal(number) is signal.SIG_IGN


def test_a_terminal_that_closes_before_the_run_begins_ends_it_and_no_process_of_the_run():
    interrupt = Interrupt()
    with interrupt.hangup_deferred():
        child = subprocess.Popen(
            [sys.executable, "-c", "print('here', flush=True); input()"], stdin=-1, stdout=-1
        )
        assert child.stdout.readline() == b"here\n"
        child.send_signal(signal.SIGHUP)
        send(signal.SIGHUP)
        with interrupt:
            assert interrupt.requested
            assert interrupt.reason == "SIGHUP, as its terminal closed"
        assert child.poll() is None
        child.communicate(b"\n", timeout=60)
        assert child.returncode == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_a_terminal_that_closes_while_a_finished_run_ends_changes_nothing():
    interrupt = Interrupt()
    with interrupt.hangup_deferred():
        with interrupt:
            pass
        send(signal.SIGHUP)
    assert not interrupt.requested


def test_under_nohup_nothing_is_deferred():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt = Interrupt()
    with interrupt.hangup_deferred(), interrupt:
        send(signal.SIGHUP)
        assert not interrupt.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def waits(interrupt, number):
    with interrupt.wait_limited(0.05):
        if number is not None:
            send(number)
        assert not threading.Event().wait(60)


@pytest.mark.parametrize("early", [True, False])
def test_a_wait_for_gmis_ends_some_time_after_the_signal_and_says_so(early):
    """It may have come before the wait, too."""
    with Interrupt() as interrupt:
        if early:
            send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt, match=r"^SIGTERM, and no answer of the GMIs for 0 s$"):
            waits(interrupt, None if early else signal.SIGTERM)


def test_a_wait_that_ends_in_time_is_followed_by_no_signal():
    with Interrupt() as interrupt:
        with interrupt.wait_limited(60.0):
            send(signal.SIGTERM)
        timer = interrupt._timer
        timer.join(60)
        assert not timer.is_alive()
        timer.function()  # as if it had gone off just then
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            send(signal.SIGINT)  # a second Ctrl-C is not taken for it


def test_without_a_signal_a_wait_has_no_limit():
    with Interrupt() as interrupt, interrupt.wait_limited(0.0):
        assert interrupt._timer is None
    assert not interrupt.requested


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_a_run_a_signal_ends_at_once(number):
    before, ended = signal.getsignal(number), []
    with EarlyEnd(ended.append) as early:
        with pytest.raises(KeyboardInterrupt):
            send(number)
        assert early.reason
    assert signal.getsignal(number) is before
    assert (EarlyEnd.current, ended) == (None, [])


def test_what_does_not_end_after_a_signal_is_ended_beside_the_main_thread():
    overdue = threading.Event()
    with EarlyEnd(lambda reason: reason == "Ctrl-C" and overdue.set(), limit_s=0.01):
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert overdue.wait(30)


def test_a_signal_waits_for_callbacks_of_imports_to_end():
    """What is raised in them is dropped, and the lock that they hold is kept."""
    ended = run_python(
        """
        import os, signal
        from rayagi.run.interrupt import EarlyEnd

        code = compile("os.kill(os.getpid(), signal.SIGINT); inside.append(1)", "<frozen importlib._bootstrap>", "exec")
        inside = []
        with EarlyEnd(print):
            try:
                exec(code)
                while True:
                    inside.append(2)
            except KeyboardInterrupt:
                print(inside[:2])
        """
    )
    assert ended.stdout == "[1, 2]\n"


def test_a_run_that_a_dropped_signal_should_have_prevented_ends_with_a_save():
    with EarlyEnd(print) as early:
        with pytest.raises(KeyboardInterrupt):  # which is dropped
            send(signal.SIGTERM)
        calls = []
        with Interrupt(lambda: calls.append(1)) as interrupt:
            assert (interrupt.requested, interrupt.reason, calls) == (True, "SIGTERM", [1])
            assert all(timer.finished.is_set() for timer in early._timers)
