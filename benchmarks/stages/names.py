"""Names of servers and conditions, as the tables and the targets spell them."""

PEER_SERVER = "vLLM"
PEER_CHUNKED_SERVER = "vLLM, chunks of 256"
AGGREGATED_SERVER = "moerelay aggregated"
DISAGGREGATED_SERVER = "moerelay 1P+1D"

PEER = f"{PEER_SERVER}, rows off"
PEER_CHUNKED = f"{PEER_CHUNKED_SERVER}, rows off"
AGGREGATED = f"{AGGREGATED_SERVER}, rows on"
AGGREGATED_OFF = f"{AGGREGATED_SERVER}, rows off"
DISAGGREGATED = f"{DISAGGREGATED_SERVER}, rows on"
