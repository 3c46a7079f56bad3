import sys
sys.path.insert(0,"/work/main/tests/distributed")
from support.ranks import run_ranks
from test_async_schedules import _schedules
def stress(a,b):
    sys.setswitchinterval(1e-5)
    return _schedules(a,b)
import pytest
@pytest.mark.parametrize("ranks,first",[(2,1000),(3,2000),(4,3000),(3,4000)])
def test_stress(ranks, first):
    run_ranks(ranks, stress, first, first+300, timeout=280)
