"""The tool server that `vf-init product --add-tool` scaffolds, with its tool written."""

import verifiers.v1 as vf


class ProductToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "product"

    @vf.tool
    def multiply(self, a: int, b: int) -> str:
        """Multiplies two whole numbers."""
        return str(a * b)


if __name__ == "__main__":
    ProductToolset.run()
