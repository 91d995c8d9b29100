# What the public image of Prometheus is, made of Debian's program.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN install -d -o nobody -g nogroup /prometheus
COPY prometheus /bin/prometheus
USER nobody
ENTRYPOINT ["/bin/prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
