"""Bundles as artifacts in an OCI registry: `push` and `pull`.

The requests are sent by httpx, which transformers installs already (huggingface_hub needs it), so the extra `registry`
adds no package. The alternatives cost more and do less (PyPI, 2026-11-22, packages that d2sd does not install anyway):
oras 0.2.43 is 9 packages of 1.1 MB, reads a whole blob into memory to send it, cannot continue a download and repeats a
refused login for 131 s; the oras program is not on PyPI; for object stores obstore is 5.6 MB, boto3 17 MB, s3fs 20 MB.
Artifacts follow the OCI specification: `oras pull` restores the same folder.
"""
