"""Several processes, ranks, run one model: rank 0 has the engine and sends the inputs of its passes to the others."""
