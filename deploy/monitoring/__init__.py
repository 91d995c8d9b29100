"""Alert rules and dashboards as code: what deploy/prometheus and deploy/grafana are generated from."""
