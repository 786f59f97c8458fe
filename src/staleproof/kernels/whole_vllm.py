"""What every process of ours sets before it starts a whole vLLM."""

ENVIRONMENT = {
    # The engine runs in the process that asks it, so that spies and questions reach it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # FlashInfer need not be there.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
