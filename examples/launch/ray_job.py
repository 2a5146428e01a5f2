"""Runs a plan on the hosts of a Ray cluster: ray job submit --working-dir . -- python ray_job.py"""

import socket
import subprocess

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, PER_NODE = 2, 4
RESOURCES = {"CPU": PER_NODE, "GPU": PER_NODE}  # of each host
ARGUMENTS = ["run", "plan.toml"]


@ray.remote(max_retries=0)
def endpoint():
    """Returns the address of the host and a free port, as "address:port"."""
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


@ray.remote(max_retries=0)
def node(number, address):
    """Runs the ranks of the host `number` until they end, and returns their exit code."""
    host, _, port = address.rpartition(":")
    ranks = ["--nnodes", NODES, "--nproc-per-node", PER_NODE, "--node-rank", number]
    command = ["torchrun", *ranks, "--master-addr", host, "--master-port", port, "-m", "train_cli", *ARGUMENTS]
    return subprocess.call([str(part) for part in command])


def build_options(host):
    """Returns the options that run a task on the host `host`, with the resources that are reserved there."""
    place = PlacementGroupSchedulingStrategy(placement_group=hosts, placement_group_bundle_index=host)
    return {"scheduling_strategy": place}


ray.init()
hosts = placement_group([RESOURCES] * NODES, strategy="STRICT_SPREAD")
ray.get(hosts.ready())
address = ray.get(endpoint.options(num_cpus=0, **build_options(0)).remote())
resources = {"num_cpus": RESOURCES["CPU"], "num_gpus": RESOURCES.get("GPU", 0)}
waiting = [node.options(**resources, **build_options(number)).remote(number, address) for number in range(NODES)]
while waiting:
    done, waiting = ray.wait(waiting)
    if code := ray.get(done[0]):
        for other in waiting:
            ray.cancel(other, force=True)
        raise SystemExit(code)
