"""Where the handlers find the cluster's control in the application."""

from aiohttp import web

from router.control.cluster import ClusterControl

CLUSTER_CONTROL = web.AppKey("cluster_control", ClusterControl)
