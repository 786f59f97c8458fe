"""Environment variables that each of our processes sets before it starts a whole vLLM."""

ENVIRONMENT = {
    # Run the engine in the calling process, so that our hooks and probes can reach it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # So that FlashInfer need not be installed.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
