"""Several processes, ranks, run one model: rank 0 has the engine and tells the others the inputs of its passes."""
