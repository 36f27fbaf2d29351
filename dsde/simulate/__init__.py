"""`dsde simulate`: routers against each other on modelled replicas, with the scoring code that serves."""
