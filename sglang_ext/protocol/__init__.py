"""Messages between processes: instances, routers, and clients of the cluster's HTTP interface."""
