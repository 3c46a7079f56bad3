"""Everything that the tools use of bagua-net-bench: no other file of theirs imports from bagua.net.bench."""

# ruff: noqa: F401

from bagua.net.bench import rank_process
from bagua.net.bench.argument_types import byte_size, names_of, within
from bagua.net.bench.driver_group import DriverGroup
from bagua.net.bench.driver_process import DriverProcess
from bagua.net.bench.endpoint import Event, ask, gather
from bagua.net.bench.errors import BenchError
from bagua.net.bench.export import check_output_files, make_folder
from bagua.net.bench.figures import backend_label, figures, result_of, speedup
from bagua.net.bench.gpu_sharing import gpu_name, sharing_of
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.nccl_ab.backend import (
    DEFAULT_TUNED,
    PLUGIN_NETWORK,
    SOCKET_NETWORK,
    Backend,
    bagua_net_variant,
    ignored_variables,
    is_owned,
    make_backends,
    tuned_settings,
    worker_environment,
)
from bagua.net.bench.nccl_ab.log import network_error, read_proof_file
from bagua.net.bench.nccl_ab.results import BEST_TUNED_NAME
from bagua.net.bench.network_path import NetworkPath
from bagua.net.bench.places import LocalPlace
from bagua.net.bench.progress import Progress
from bagua.net.bench.result_file import Figure, Label, write_result
from bagua.net.bench.ring.sessions import RawSession, RingSession
from bagua.net.bench.sample import Case
from bagua.net.bench.settings import DriverRequest, driver_settings
from bagua.net.bench.sizes import format_size, parse_size
from bagua.net.bench.table import (
    MISSING,
    Column,
    format_bandwidth,
    format_time_us,
    render_rows,
    shows_colour,
)
from bagua.net.bench.turns import Turns
from bagua.net.bench.verdict import MIN_REPETITIONS, PairedRatio, Verdict, paired_ratio
