"""What tools may use of the benchmark: samples, turns, verdicts, tables, result files, and the processes of ranks.

Nothing outside `bagua` imports another module of bagua.net.bench (a contract of import-linter says so), and nothing in
`bagua` imports this one: the commands load only what they need.
"""

from __future__ import annotations

from bagua.net.bench.command_line import (
    OptionParser,
    byte_size,
    check_output_files,
    make_folder,
    names_of,
    run_in_order,
    within,
)
from bagua.net.bench.driver import BASELINE, DriverRequest, NetworkPath, driver_settings
from bagua.net.bench.errors import BenchError
from bagua.net.bench.gpu_sharing import gpu_name, sharing_of
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.measurement import Case
from bagua.net.bench.nccl_ab.backend import (
    DEFAULT_TUNED,
    PLUGIN_NETWORK,
    SOCKET_NETWORK,
    Backend,
    ignored_variables,
    is_owned,
    make_backends,
    tuned_settings,
    worker_environment,
)
from bagua.net.bench.nccl_ab.options import make_parser as make_nccl_parser
from bagua.net.bench.nccl_ab.report import BEST_TUNED_NAME
from bagua.net.bench.nccl_ab.session import GPU_COLLECTIVES
from bagua.net.bench.nccl_log import network_error, read_proof_file
from bagua.net.bench.process_tree import running
from bagua.net.bench.processes import DriverProcess, Event, LocalPlace, ask, gather
from bagua.net.bench.processes import Processes as DriverGroup
from bagua.net.bench.rank_process import rank_command, run_rank
from bagua.net.bench.result_file import (
    Figure,
    Label,
    ResultFile,
    backend_label,
    figures,
    read_result,
    result_of,
    speedup,
    write_result,
)
from bagua.net.bench.ring.options import make_parser as make_ring_parser
from bagua.net.bench.ring.sessions import RawSession, RingSession
from bagua.net.bench.sizes import format_size, parse_size
from bagua.net.bench.table import MISSING, Column, format_bandwidth, format_time_us, render_rows, shows_colour
from bagua.net.bench.turns import Turns
from bagua.net.bench.verdict import MIN_REPETITIONS, PairedRatio, Verdict, paired_ratio
from bagua.progress import Progress
