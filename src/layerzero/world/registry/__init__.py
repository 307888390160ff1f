"""The kernels there are: the catalog, plugins, certificates, kernels in worker processes."""
