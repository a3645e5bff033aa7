# SPDX-License-Identifier: Apache-2.0
"""The one place that adapts Megatron's modules: CPU shim, backend, provider, checkpoint wrappers.

Models import Megatron's building blocks through these modules. Nothing is imported here, so that
`import vime_models.host` needs neither Megatron nor a device.
"""
