"""Accuracy by EleutherAI's lm-eval, on local data: plain decoding, speculation and other precisions in one run."""
