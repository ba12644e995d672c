"""Tunix's models without the rest of Tunix: import this before `tunix.models`.

`import tunix` loads its trainers, and with them packages of 1.6 GB. Its models need none of these. Where they
are not installed (pip install --no-deps google-tunix), a bare package stands in for the one that loads them.
"""

import importlib.util
import sys
import types

try:
    import tunix  # noqa: F401
except ImportError:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tunix"]:
        del sys.modules[name]
    if not (spec := importlib.util.find_spec("tunix")):
        sys.exit("skipped: Tunix is not installed (pip install google-tunix)")
    sys.modules["tunix"] = types.ModuleType("tunix")
    sys.modules["tunix"].__path__ = list(spec.submodule_search_locations)
