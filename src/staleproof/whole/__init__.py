"""A whole vLLM, with real weights, on any machine.

A question starts a vLLM in a child process, in whatever environment has one (:mod:`.place`), serves a
scripted load of requests and reads what came out (:mod:`.engine`): texts, tokens from the prefix cache,
counters. Patches are applied by the plugin, as an operator has them, and switched by its switch file.
"""
