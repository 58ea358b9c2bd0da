"""For the peers' own test files, whose marks are read with them."""


def pytest_configure(config):
    config.addinivalue_line("markers", "requires_trainable_backend: of Keras' test files")
