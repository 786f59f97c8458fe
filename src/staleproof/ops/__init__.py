"""What a server calls: one operation a file, each with its contract in ``ops/reference``.

Importing an operation registers it as ``torch.ops.staleproof.<name>``; ``from staleproof.ops
import *`` imports all. This package imports none of them itself: the first kernel that is loaded
decides between Triton's compiler and its interpreter for the whole process.
"""

__all__ = ["clear_empty_rows", "distinct_experts", "fp8", "mla", "nvfp4", "topk", "zero_blocks"]
