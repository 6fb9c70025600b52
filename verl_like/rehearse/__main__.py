"""Says how much memory a training command needs of each GPU: `python -m verl_like.rehearse --gpu
H100-80 key=value ...`.

The overrides are those of the command. Nothing is trained: ranks of each role run at their real
size on the null GPU, which counts memory and computes nothing.
"""

import argparse
import sys

from verl_like.rehearse.commands import COMMANDS, config_of
from verl_like.rehearse.gpu_size import GPU_GIB, bytes_of_gpu
from verl_like.rehearse.null_gpu import NullGpu
from verl_like.rehearse.processes import measure_run, refusal_at
from verl_like.rehearse.report import most_at_once, report
from verl_like.trainer.config.roles import Role
from verl_like.trainer.memory.pools import planned_pools


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 if all phases fit, 1 if one does not, 2 if input is refused."""
    parser = argparse.ArgumentParser(prog="python -m verl_like.rehearse", allow_abbrev=False)
    parser.add_argument(
        "--gpu", required=True, help=f"{', '.join(GPU_GIB)}, or a size such as 85.5GB"
    )
    parser.add_argument(
        "--command", default="main_ppo", choices=COMMANDS, help="the command; main_ppo if not given"
    )
    parser.add_argument("--config-dir", help="folder of custom YAML files")
    parser.add_argument("--config-name", help="the YAML file to start from")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    command = vars(parser.parse_intermixed_args(arguments))
    gpu = command.pop("gpu")  # the others are the arguments of `config_of`
    try:
        device_bytes = bytes_of_gpu(gpu)
        config = config_of(**command)
        null_gpu = NullGpu()
    except ValueError as error:  # also ConfigError
        parser.exit(2, f"{error}\n")
    planned = planned_pools(config, device_bytes)
    pools = measure_run(null_gpu, command, planned, device_bytes)
    refusals = {}
    for pool, planned_pool in zip(pools, planned, strict=True):
        for each in most_at_once(pool):
            process = each.process
            is_engine = Role.Rollout in process.roles
            if each.total > device_bytes and not is_engine:
                room = int(device_bytes - each.beside)
                refused = refusal_at(null_gpu, command, planned_pool, process.rank, room)
                refusals[pool.name, process.name] = refused
    text, fits = report(pools, device_bytes, refusals)
    sys.stdout.write(text + "\n")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
