"""dsde on Ray Serve: the only package that imports ray. `app.build_app` is the only wiring."""
