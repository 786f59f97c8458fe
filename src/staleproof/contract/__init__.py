"""The padding contract: clauses, probes and the runner. Its public names are in :mod:`staleproof.audit`."""
