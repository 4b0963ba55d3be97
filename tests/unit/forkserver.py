"""Where the tests' processes are forked from. A Python process has one fork server, which imports, once, what was named last
before it started: so all is named here, and no process that is started later imports it anew."""

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "pytest",
        "hypothesis.strategies",
        "torch",
        "actors.rendezvous_actor",
        "collectives.connect",
        "collectives.experience.batcher",
        "collectives.experience.migrator",
        "collectives.experience.parameters",
    ]
)
