"""A Ray cluster of several nodes on this machine, in a process of its own.

The process reads commands: `add NAME CPUS KEY=VALUE…`, `remove NAME` (without grace), `restart` (of
the head, and with it all nodes). It answers each with a line.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
HEAD = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20}
NODE = {"object_store_memory": 80 << 20}
CONFIG = {"gcs_rpc_server_reconnect_timeout_s": 5, "health_check_failure_threshold": 3}


def main() -> None:
    from ray.cluster_utils import Cluster

    def start(port: int | None = None) -> Any:
        own = {} if port is None else {"gcs_server_port": port}
        head = HEAD | {"_system_config": CONFIG | {"health_check_period_ms": 500}} | own
        return Cluster(initialize_head=True, head_node_args=head)

    cluster, nodes, added = start(), dict[str, Any](), dict[str, tuple[int, dict[str, str]]]()
    print(cluster.address, flush=True)

    def add(name: str) -> None:
        cpus, variables = added[name]
        env = {"NEGMERGE_NODE": name} | variables
        nodes[name] = cluster.add_node(num_cpus=cpus, env_vars=env, **NODE)

    for line in sys.stdin:
        command, *words = line.split()
        if command == "add":
            name, cpus, *rest = words
            added[name] = int(cpus), dict(word.split("=", 1) for word in rest)
            add(name)
        elif command == "remove":
            cluster.remove_node(nodes.pop(words[0]), allow_graceful=False)
        elif command == "restart":
            port = int(cluster.address.rpartition(":")[2])
            for node in [*nodes.values(), cluster.head_node]:
                node.kill_all_processes(check_alive=False, allow_graceful=False)
            cluster = start(port)
            for name in nodes:
                add(name)
        print(cluster.address, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
