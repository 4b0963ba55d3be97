"""Runs tasks in threads, as members of a group run in processes."""

import threading


def in_threads(tasks, limit_s=60.0):
    """What each task returned or raised, in a thread of its own."""
    results = [None] * len(tasks)

    def run(index):
        try:
            results[index] = tasks[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    assert not any(thread.is_alive() for thread in threads)
    return results


def unfailed(results):
    """The results; raises the first one that is an exception."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
