"""Questions put to a whole vLLM on a GPU: a real engine with dummy weights, with and without the plugin."""
