"""What the load test is made of; nothing here needs locust or gevent, so that it is tested without them."""
