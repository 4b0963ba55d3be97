import os
import signal

import pytest

from rayagi.run.interrupt import Interrupt, hangup_ignored

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


def test_a_sighup_ignored_for_child_processes_is_still_handled_here():
    interrupt = Interrupt()
    with hangup_ignored():
        send(signal.SIGHUP)
        with interrupt:
            send(signal.SIGHUP)
    assert interrupt.requested
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
