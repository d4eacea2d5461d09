"""For ``pytest -p tests.fake_gpu.plugin``: tests of a GPU on the emulated one, without SGLang."""

from tests import fake_gpu

fake_gpu.install(sglang=False)
