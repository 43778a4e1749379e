"""For all tests: no network, one BLAS thread per process, the BLAS users have."""

import os

os.environ.setdefault("LMX_BLAS_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from toolkit import blas  # noqa: E402 (the environment comes first)

blas.use()
