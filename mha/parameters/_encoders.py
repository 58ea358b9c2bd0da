"""The layouts of encoders, and of encoders with decoders, that do not rotate."""

from __future__ import annotations

from mha.parameters import _config as config
from mha.parameters._decoders import NAMES, PLAIN
from mha.parameters._table import EQUAL_HEADS, Layout, linear, linears

OF_BART = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
OF_BERT = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}
OF_VIT = {"q": "attention.query", "k": "attention.key", "v": "attention.value"}
# The other side of a model may be of another width.
CROSS = (("key_dim", "value_dim"), *EQUAL_HEADS)
GROUPED = (("key_dim", "value_dim"), ("head_dim", "value_head_dim"))
# Before attention, or behind it, though models keep them among its arrays.
BLOCKS_NORMS = ("output.LayerNorm.*", "LayerNorm.*", "self_attn_layer_norm.*")
QUERY = {"q": "query", "k": "key", "v": "value"}

BERT = Layout(
    "bert", (linears(OF_BERT),), passed_over=BLOCKS_NORMS, equal=CROSS,
    model_types=(
        "bert", "roberta", "xlm-roberta", "camembert", "align_text_model", "altclip_text_model",
        "bert-generation", "big_bird", "blip_text_model", "bridgetower", "bridgetower_text_model",
        "canine", "chinese_clip_text_model", "clap_text_model", "data2vec-text", "dpr", "electra",
        "ernie", "git", "layoutlm", "markuplm", "rembert", "roberta-prelayernorm", "roc_bert",
        "splinter", "xlm-roberta-xl", "xmod"),
    unsupported={"relative_attention": "attention by hand: scores with embeddings of positions"})

# Files have the first names; the modules of transformers 5, whose names changed, the others.
VIT = Layout(
    "vit", ({**linears(OF_VIT, bias=None), **linear("o", "output.dense")},
            {**linears({letter: NAMES[letter] for letter in "qkv"}, bias=None),
             **linear("o", NAMES["o"])}),
    passed_over=("output.LayerNorm.*",), equal=CROSS,
    model_types=(
        "vit", "deit", "audio-spectrogram-transformer", "blip_2_qformer", "dinov2",
        "dinov2_with_registers", "dpt", "flava_image_model", "flava_multimodal_model",
        "flava_text_model", "ijepa", "instructblip_qformer", "instructblipvideo_qformer", "pixio",
        "rf_detr_dinov2", "vilt", "vit_mae", "vit_msn", "vivit", "yolos"))

LAYOUTS = (
    BERT,
    BERT._replace(name="mobilebert", equal=EQUAL_HEADS, model_types=("mobilebert",)),
    BERT._replace(name="roformer", settings={"rotary": config.rotary}, needs=("rotary",),
                  rotary_layout="interleaved", model_types=("roformer",),
                  unsupported={"rotary_value": "attention by hand: values that rotate, too"}),
    BERT._replace(name="esm", settings={"rotary": config.rotary_of_esm}, needs=("rotary",),
                  passed_over=(*BLOCKS_NORMS, "self.rotary_embeddings.inv_freq"),
                  model_types=("esm",)),
    Layout("bart", (linears(OF_BART),), equal=CROSS, model_types=(
        "bart", "mbart", "altclip_vision_model", "biogpt", "blenderbot", "blenderbot-small",
        "chinese_clip_vision_model", "clip_text_model", "clip_vision_model", "clipseg_text_model",
        "clipseg_vision_model", "clvp_decoder", "dab-detr", "data2vec-audio", "git_vision_model",
        "granite_docling_vision", "groupvit_text_model", "groupvit_vision_model", "hubert",
        "idefics2_vision", "idefics3_vision", "informer", "kosmos_2_5_text_model",
        "kosmos_2_vision_model", "m2m_100", "marian", "metaclip_2_text_model",
        "metaclip_2_vision_model", "mvp", "nllb-moe", "opt", "owlv2_text_model",
        "owlv2_vision_model", "owlvit_text_model", "owlvit_vision_model", "patchtst", "pegasus",
        "phi4_multimodal_vision", "plbart", "pp_formulanet_text", "sam3_lite_text_text_model",
        "sew", "siglip2_text_model", "siglip2_vision_model", "siglip_text_model",
        "siglip_vision_model", "smolvlm_vision", "speech_to_text", "table-transformer",
        "time_series_transformer", "tipsv2_text_model", "trocr", "unispeech", "unispeech-sat",
        "wav2vec2", "xclip_text_model", "xglm")),
    Layout("aimv2", (linears(OF_BART, bias=None),), equal=CROSS,
           model_types=(
               "aimv2_text_model", "aimv2_vision_model", "bigbird_pegasus", "musicgen_decoder",
               "musicgen_melody_decoder", "ovis2_vision")),
    Layout("whisper", ({**linears({letter: OF_BART[letter] for letter in "qvo"}),
                        **linear("k", OF_BART["k"], bias=False)},), equal=CROSS,
           model_types=(
               "whisper", "audioflamingo3_encoder", "moss_transcribe_diarize_audio",
               "qwen2_audio_encoder", "voxtral_encoder")),
    VIT,
    VIT._replace(name="beit", partial_biases=("qvo",),
                 model_types=("beit", "data2vec-vision", "videomae")),
    # The modules of transformers 5 have the first names, older files the others.
    Layout("detr", (PLAIN, linears(OF_BART, bias=None)), equal=GROUPED, biases={},
           partial_biases=("qvo", "qkv"), model_types=(
        "detr", "canary_decoder", "cohere_asr", "conditional_detr", "d_fine", "deformable_detr",
        "deimv2", "jamba", "lw_detr_vit", "mllama_vision_model", "molmo2_adapter", "molmo2_vision",
        "moonshine_streaming_encoder", "nemotron_h", "pp_doclayout_v2", "pp_doclayout_v4", "radio",
        "rt_detr", "rt_detr_v2", "tipsv2_vision_model")),
    Layout("internvl", (linears({**OF_BART, "o": "projection_layer"}, bias=None),), equal=CROSS,
           partial_biases=("o",),
           model_types=("internvl_vision", "janus_vision_model", "qianfan_ocr_vision")),
    Layout("distilbert", (linears({"q": "q_lin", "k": "k_lin", "v": "v_lin", "o": "out_lin"}),),
           equal=CROSS, model_types=("distilbert", "flaubert", "xlm")),
    Layout("albert", (linears({**QUERY, "o": "dense"}),), equal=CROSS, passed_over=BLOCKS_NORMS,
           model_types=("albert",)),
    Layout("ctrl", (linears({"q": "Wq", "k": "Wk", "v": "Wv", "o": "dense"}),),
           model_types=("ctrl",)),
    Layout("kosmos2_5", (linears({**QUERY, "o": "output"}, bias=None),), equal=CROSS,
           model_types=("kosmos_2_5_vision_model",)),
    Layout("pix2struct", (linears({**QUERY, "o": "output"}, bias=False),),
           constants={"scale": 1.0}, equal=CROSS, model_types=("pix2struct_vision_model",)),
    Layout("gpt_neo", ({**linears({letter: OF_BART[letter] for letter in "qkv"}, bias=False),
                        **linear("o", OF_BART["o"])},), {"window": config.window_of_gpt_neo},
           constants={"scale": 1.0}, passed_over=("bias", "masked_bias"),
           model_types=("gpt_neo",)),
    Layout("gptj", (linears(OF_BART, bias=False),), {"rotary": config.rotary}, needs=("rotary",),
           passed_over=("bias", "masked_bias", "embed_positions"), rotary_layout="interleaved",
           model_types=("gptj",)),
)
