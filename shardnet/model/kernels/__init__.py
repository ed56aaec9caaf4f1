"""Linear kernels and the compiled library."""

import sys
from typing import Final

LIBRARY: Final = "_quantized.dll" if sys.platform == "win32" else "_quantized.so"
"""The library beside this file, as setup.py names it. A checkout may have both."""
