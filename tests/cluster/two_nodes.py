"""A Ray of two nodes on this machine."""

from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster


@contextmanager
def two_nodes(num_gpus=None, **options):
    """The cluster and its second node, each of one CPU; this process is a driver, with these options of ``ray.init``."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": num_gpus})
    try:
        second = cluster.add_node(num_cpus=1, num_gpus=num_gpus)
        ray.init(address=cluster.address, log_to_driver=False, **options)
        cluster.wait_for_nodes(timeout=60)
        yield cluster, second
    finally:
        ray.shutdown()
        cluster.shutdown()
