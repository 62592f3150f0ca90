"""Where there is no GPU, Triton kernels run in Triton's interpreter.

It must be chosen before triton is first imported: the interpreter replaces the language, not the launch.
"""

import os
import sys

import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
