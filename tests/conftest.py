"""Settings of all tests. `checking` and `classes` are importable from every folder below this one."""

import contextlib
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # The same examples in every run: a failure that only some runs see helps nobody.
    settings.register_profile(
        "fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("fixed")
