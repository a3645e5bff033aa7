# SPDX-License-Identifier: Apache-2.0
class RoutingReplay:
    @staticmethod
    def clear_all_forward():
        pass

    @staticmethod
    def begin_lazy_pass(release_stage):
        pass
