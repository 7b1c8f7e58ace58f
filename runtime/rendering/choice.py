"""Which renderer a model folder gets."""

from collections.abc import Mapping
from typing import Any

from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.library import open_family
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.runtime.rendering.template import ChatTemplate
from sostenuto.runtime.rendering.template_renderer import TemplateRenderer
from sostenuto.runtime.rendering.vocabulary import Vocabulary


def open_renderer(folder: ModelFolder, options: Mapping[str, Any] | None = None) -> Renderer:
    """A family of the library where it is exact for this folder, else the folder's own template.

    `options` are values for the template, such as `enable_thinking`; with any, the template renders.
    """
    vocabulary = Vocabulary(folder.tokenizer_json)
    if not options:
        template = ChatTemplate(folder.chat_template, folder.special_tokens)
        if family := open_family(folder, vocabulary, template):
            return family
    return TemplateRenderer(folder, vocabulary, options)
