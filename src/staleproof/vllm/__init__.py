"""What an operator of vLLM installs: a plugin, and the patches it puts in place."""
