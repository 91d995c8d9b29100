"""`moerelay verify`: is a running cluster equal to a solo run, bit for bit?"""
