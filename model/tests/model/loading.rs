//! Folders that are right, and every way in which they can be wrong.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;
use terrace_engine::Forward;
use terrace_model::{Conversation, load};

use crate::folder::{Dtype, Folder, write_json};

/// Loads what must not be loaded, and checks that the error names the file and says these words.
#[track_caller]
fn refused(folder: &TempDir, file: &str, words: &[&str]) {
    let error = match load(folder.path(), 1) {
        Ok(_) => panic!("a wrong folder was loaded, expected {words:?}"),
        Err(error) => error.to_string(),
    };
    let path = folder.path().join(file);
    assert!(error.contains(&path.display().to_string()), "{error:?} does not name {file}");
    for word in words {
        assert!(error.contains(word), "{error:?} does not say {word:?}");
    }
}

#[track_caller]
fn refused_config(changes: Value, words: &[&str]) {
    let mut folder = Folder::llama();
    for (name, value) in changes.as_object().unwrap() {
        folder.config[name] = value.clone();
    }
    refused(&folder.write(), "config.json", words);
}

fn cut(path: &Path, len: u64) {
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
}

#[test]
fn a_folder_says_all_about_its_model() {
    let folder = Folder::llama().write();
    let model_folder = folder.path().join("tiny");
    fs::create_dir(&model_folder).unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::rename(folder.path().join(file), model_folder.join(file)).unwrap();
    }
    let loaded = load(&model_folder, 2).unwrap();
    assert_eq!(loaded.name, "tiny");
    assert_eq!(loaded.stop_tokens, [262]);
    assert!(!loaded.chat.exists());
    let (model, shape) = (&loaded.model, loaded.model.kv_shape());
    assert_eq!((shape.layers, shape.heads, shape.head_elements), (2, 2, 10));
    assert_eq!((model.vocabulary(), model.positions_max()), (300, 4096));
}

#[test]
fn a_fingerprint_names_what_decides_the_bits_of_products() {
    #[cfg(target_arch = "x86_64")]
    let fused = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    let fused = false;
    let expected = if fused { "-fma".to_owned() } else { format!("-{}", std::env::consts::ARCH) };
    for model in [terrace_model::built_in(1).model, Folder::llama().load().unwrap().model] {
        let fingerprint = model.fingerprint();
        let rest = fingerprint.strip_suffix(&expected).expect("a name for the arithmetic");
        assert!(!rest.is_empty());
    }
}

#[test]
fn different_weights_sizes_and_dtypes_have_different_fingerprints() {
    let fingerprint = |folder: &Folder| folder.load().unwrap().model.fingerprint();
    let folder = Folder::llama();
    let expected = fingerprint(&folder);
    assert_eq!(fingerprint(&folder), expected);
    let mut sharded = folder.clone();
    sharded.shards = 3;
    assert_eq!(fingerprint(&sharded), expected, "where weights lie does not matter");

    let mut others = vec![expected];
    let mut other = folder.clone();
    other.tensors.get_mut("model.norm.weight").unwrap().numbers[7] += 0.5;
    others.push(fingerprint(&other));
    let mut other = folder.clone();
    other.dtype = Dtype::Bf16;
    others.push(fingerprint(&other));
    let mut other = folder.clone();
    other.config["rope_theta"] = json!(500_000.0);
    others.push(fingerprint(&other));
    let mut other = folder;
    other.config["rms_norm_eps"] = json!(1e-6);
    others.push(fingerprint(&other));
    let count = others.len();
    others.sort_unstable();
    others.dedup();
    assert_eq!(others.len(), count);
}

#[test]
fn stop_tokens_come_from_the_most_particular_file() {
    let folder = Folder::llama().write();
    let stop_tokens = || load(folder.path(), 1).unwrap().stop_tokens;
    let path = folder.path().join("generation_config.json");
    write_json(&path, &json!({ "eos_token_id": [3, 5] }));
    assert_eq!(stop_tokens(), [3, 5]);
    write_json(&path, &json!({ "eos_token_id": 4 }));
    assert_eq!(stop_tokens(), [4]);
    write_json(&path, &json!({ "temperature": 0.6 }));
    assert_eq!(stop_tokens(), [262]);
    write_json(&path, &json!({ "eos_token_id": 300 }));
    refused(&folder, "generation_config.json", &["eos_token_id is 300"]);

    let mut folder = Folder::llama();
    folder.config["eos_token_id"] = Value::Null;
    let folder = folder.write();
    write_json(&folder.path().join("tokenizer_config.json"), &json!({ "eos_token": "<|end|>" }));
    assert_eq!(load(folder.path(), 1).unwrap().stop_tokens, [262]);
}

#[test]
fn a_missing_file_is_named() {
    for (file, words) in [
        ("config.json", "is this the right folder?"),
        ("model.safetensors", "weights must be in safetensors files"),
        ("tokenizer.json", "models need one"),
    ] {
        let folder = Folder::llama().write();
        fs::remove_file(folder.path().join(file)).unwrap();
        refused(&folder, file, &["does not exist", words]);
    }
}

#[test]
fn a_missing_shard_is_named() {
    let mut folder = Folder::llama();
    folder.shards = 3;
    let folder = folder.write();
    fs::remove_file(folder.path().join("model-1.safetensors")).unwrap();
    refused(&folder, "model-1.safetensors", &["does not exist", "download all shards"]);
}

#[test]
fn an_index_cannot_lead_out_of_its_folder() {
    let mut folder = Folder::llama();
    folder.shards = 2;
    let folder = folder.write();
    let index = "model.safetensors.index.json";
    for name in ["../model-1.safetensors", "/etc/passwd", "..", ""] {
        write_json(&folder.path().join(index), &json!({ "weight_map": { "a": name } }));
        refused(&folder, index, &["not a file name in the same folder"]);
    }
    write_json(&folder.path().join(index), &json!({ "weight_map": {} }));
    refused(&folder, index, &["there is no tensor model.embed_tokens.weight"]);
}

#[test]
fn a_truncated_file_of_weights_is_refused_wherever_it_ends() {
    let whole = Folder::llama().safetensors(|_| true);
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap());
    let folder = Folder::llama().write();
    let path = folder.path().join("model.safetensors");
    for (len, words) in [
        (whole.len() as u64 - 1, "its weights do not end where the file does"),
        (header, "its weights do not end where the file does"),
        (header - 1, "its header should be longer than the file"),
        (9, "its header should be longer than the file"),
        (7, "7 bytes are not a safetensors file"),
        (0, "0 bytes are not a safetensors file"),
    ] {
        cut(&path, len);
        refused(&folder, "model.safetensors", &[words, "download it again"]);
    }
}

#[test]
fn a_header_that_lies_is_refused() {
    let folder = Folder::llama().write();
    let path = folder.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let told: Value = serde_json::from_slice(&whole[8..header]).unwrap();
    let rewrite = |change: &dyn Fn(&mut Value)| {
        let mut told = told.clone();
        change(&mut told["model.norm.weight"]);
        let told = serde_json::to_vec(&told).unwrap();
        let mut bytes = (told.len() as u64).to_le_bytes().to_vec();
        bytes.extend(told);
        bytes.extend(&whole[header..]);
        fs::write(&path, bytes).unwrap();
    };
    rewrite(&|tensor| tensor["data_offsets"] = json!([u64::MAX - 10, u64::MAX]));
    refused(&folder, "model.safetensors", &["model.norm.weight does not begin where"]);
    rewrite(&|tensor| tensor["data_offsets"] = json!([100, 0]));
    refused(&folder, "model.safetensors", &["does not begin where the tensor before it ends"]);
    rewrite(&|tensor| tensor["shape"] = json!([44, 2]));
    refused(&folder, "model.safetensors", &["a tensor has other bytes than its shape"]);
    rewrite(&|tensor| tensor["dtype"] = json!("I32"));
    refused(&folder, "model.safetensors", &["the dtype I32 of model.norm.weight is not supported"]);
    rewrite(&|tensor| tensor["dtype"] = json!("F128"));
    refused(&folder, "model.safetensors", &["unknown variant `F128`"]);
    rewrite(&|tensor| tensor["shape"] = json!("wide"));
    refused(&folder, "model.safetensors", &["cannot be parsed"]);
    fs::write(&path, [&u64::MAX.to_le_bytes()[..], b"{}"].concat()).unwrap();
    refused(&folder, "model.safetensors", &["its header should be longer than the file"]);
}

/// Tensors that all lie in the same place would let a small file become a model of any size.
#[test]
fn a_small_file_does_not_become_a_large_model() {
    let folder = Folder::llama().write();
    let path = folder.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut told: Value = serde_json::from_slice(&whole[8..header]).unwrap();
    let mut longest = 0;
    for tensor in told.as_object_mut().unwrap().values_mut() {
        if let [Some(start), Some(end)] = [0, 1].map(|at| tensor["data_offsets"][at].as_u64()) {
            tensor["data_offsets"] = json!([0, end - start]);
            longest = longest.max(end - start);
        }
    }
    let told = serde_json::to_vec(&told).unwrap();
    let length = (told.len() as u64).to_le_bytes();
    fs::write(&path, [&length[..], &told, &whole[header..][..longest as usize]].concat()).unwrap();
    refused(&folder, "model.safetensors", &["does not begin where the tensor before it ends"]);
}

#[test]
fn a_missing_tensor_is_named() {
    let mut folder = Folder::llama();
    folder.tensors.remove("model.layers.1.mlp.up_proj.weight");
    let words = ["there is no tensor model.layers.1.mlp.up_proj.weight"];
    refused(&folder.write(), "model.safetensors", &words);
    folder.shards = 2;
    refused(&folder.write(), "model.safetensors.index.json", &words);
}

#[test]
fn weights_of_another_size_are_refused() {
    let mut folder = Folder::llama();
    folder.config["intermediate_size"] = json!(64);
    let words = ["mlp.gate_proj.weight has the shape [52, 44], expected [64, 44]"];
    refused(&folder.write(), "model.safetensors", &words);
}

#[test]
fn models_of_other_kinds_are_refused() {
    let other = json!({ "architectures": ["MixtralForCausalLM"], "model_type": null });
    refused_config(other, &["the architecture MixtralForCausalLM is not supported"]);
    let other = json!({ "architectures": null, "model_type": "gpt2" });
    refused_config(other, &["the model_type gpt2 is not supported"]);
    let other = json!({ "architectures": null, "model_type": null });
    refused_config(other, &["neither architectures nor model_type"]);
    refused_config(json!({ "hidden_act": "gelu" }), &["hidden_act gelu"]);
    refused_config(json!({ "attention_bias": true }), &["attention_bias"]);
    refused_config(json!({ "mlp_bias": true }), &["mlp_bias"]);
    refused_config(json!({ "quantization_config": {} }), &["quantised weights"]);
    let yarn = json!({ "rope_scaling": { "type": "yarn", "factor": 4.0 } });
    refused_config(yarn, &["rope scaling of type yarn is not supported"]);
    let incomplete = json!({ "rope_scaling": { "rope_type": "llama3", "factor": 4.0 } });
    refused_config(incomplete, &["without low_freq_factor"]);
    let window = json!({ "architectures": ["MistralForCausalLM"], "sliding_window": 1024 });
    refused_config(window, &["sliding window"]);
    for folder in [Folder::qwen2(), Folder::qwen3()] {
        let mut sliding = folder.clone();
        sliding.config["use_sliding_window"] = json!(true);
        refused(&sliding.write(), "config.json", &["sliding window"]);
        let mut yarn = folder;
        yarn.config["rope_scaling"] = json!({ "rope_type": "yarn", "factor": 4.0 });
        refused(&yarn.write(), "config.json", &["rope scaling of type yarn"]);
    }
    let mut biased = Folder::qwen3();
    biased.config["attention_bias"] = json!(true);
    refused(&biased.write(), "config.json", &["attention_bias"]);
    let experts = json!({ "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe" });
    refused_config(experts, &["the architecture Qwen3MoeForCausalLM"]);
}

#[test]
fn a_qwen3_is_loaded_with_its_norms_and_the_width_of_its_heads() {
    let mut folder = Folder::qwen3();
    let loaded = folder.load().unwrap();
    assert_eq!(loaded.stop_tokens, [262, 261]);
    let shape = loaded.model.kv_shape();
    assert_eq!((shape.layers, shape.heads, shape.head_elements), (3, 2, 18));
    let fingerprint = loaded.model.fingerprint();
    let name = "model.layers.2.self_attn.q_norm.weight";
    folder.tensors.get_mut(name).unwrap().numbers[17] += 0.5;
    assert_ne!(folder.load().unwrap().model.fingerprint(), fingerprint);
    folder.tensors.remove(name);
    refused(&folder.write(), "model.safetensors", &[&format!("there is no tensor {name}")]);

    let mut by_type = Folder::qwen3();
    by_type.config["architectures"] = Value::Null;
    assert_eq!(by_type.load().unwrap().model.fingerprint(), fingerprint);
    by_type.config["head_dim"] = Value::Null;
    let words = ["self_attn.q_proj.weight has the shape [72, 32], expected [512, 32]"];
    refused(&by_type.write(), "model.safetensors", &words);
}

#[test]
fn another_architecture_is_named_whatever_fields_it_has() {
    let folder = Folder::llama().write();
    let gpt2 = json!({ "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768 });
    write_json(&folder.path().join("config.json"), &gpt2);
    let words = [
        "the architecture GPT2LMHeadModel, of model_type gpt2, is not supported",
        "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM",
    ];
    refused(&folder, "config.json", &words);
}

#[test]
fn what_git_lfs_has_not_fetched_is_told_apart_from_damage() {
    let pointer = "version https://git-lfs.github.com/spec/v1\n\
                   oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n\
                   size 268435456\n";
    for file in ["model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json"] {
        let folder = Folder::llama().write();
        fs::write(folder.path().join(file), pointer).unwrap();
        refused(&folder, file, &["git-lfs", "`git lfs pull`"]);
    }
    let mut sharded = Folder::llama();
    sharded.shards = 2;
    let folder = sharded.write();
    let shards = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let mut shards: Vec<String> = shards.map(|name| name.into_string().unwrap()).collect();
    shards.retain(|name| name.ends_with(".safetensors"));
    fs::write(folder.path().join(&shards[0]), pointer).unwrap();
    refused(&folder, &shards[0], &["`git lfs pull`"]);
}

#[test]
fn a_mistral_without_a_window_is_a_llama() {
    let mut folder = Folder::llama();
    folder.config["architectures"] = json!(["MistralForCausalLM"]);
    folder.config["sliding_window"] = Value::Null;
    folder.load().unwrap();
    folder.config["sliding_window"] = json!(4096);
    folder.load().unwrap();
}

#[test]
fn absurd_sizes_are_refused_before_anything_is_allocated() {
    for (name, value) in [
        ("num_attention_heads", json!(0)),
        ("num_key_value_heads", json!(0)),
        ("num_hidden_layers", json!(0)),
        ("hidden_size", json!(1_u64 << 60)),
        ("vocab_size", json!(u64::MAX)),
        ("intermediate_size", json!(1_u64 << 40)),
        ("num_hidden_layers", json!(1_000_000)),
        ("head_dim", json!(9)),
        ("head_dim", json!(0)),
        ("max_position_embeddings", json!(0)),
        ("max_position_embeddings", json!(u32::MAX)),
        ("rms_norm_eps", json!(-1.0)),
        ("rms_norm_eps", json!(1e300)),
        ("rope_theta", json!(0.0)),
        ("rope_theta", json!(-3.0)),
    ] {
        refused_config(json!({ (name): value }), &[name, "must be"]);
    }
    let words = ["num_attention_heads is 6, which num_key_value_heads, 4, does not divide"];
    refused_config(json!({ "num_key_value_heads": 4 }), &words);
    for (name, value) in [("vocab_size", json!(-1)), ("hidden_size", json!(1e30))] {
        refused_config(json!({ (name): value }), &["cannot be parsed"]);
    }
    let folder = Folder::llama().write();
    let path = folder.path().join("config.json");
    let config = fs::read_to_string(&path).unwrap().replace("10000.0", "NaN");
    fs::write(&path, config).unwrap();
    refused(&folder, "config.json", &["cannot be parsed"]);
}

#[test]
fn a_model_without_the_tokens_of_its_tokenizer_is_refused() {
    let mut folder = Folder::llama();
    folder.config["vocab_size"] = json!(260);
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let tensor = folder.tensors.get_mut(name).unwrap();
        tensor.shape[0] = 260;
        tensor.numbers.truncate(260 * 44);
    }
    let words = ["it has 263 tokens, but the model has only 260"];
    refused(&folder.write(), "tokenizer.json", &words);
}

#[test]
fn files_that_are_something_else_are_refused() {
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    {
        let folder = Folder::llama().write();
        fs::write(folder.path().join(file), "<html>").unwrap();
        refused(&folder, file, &["cannot be parsed", "download it again"]);
    }
}

#[test]
fn a_chat_template_is_found_where_folders_have_it() {
    let folder = Folder::llama().write();
    let settings = folder.path().join("tokenizer_config.json");
    let rendered =
        || load(folder.path(), 1).unwrap().chat.render(&Conversation::default()).unwrap();
    let begin = json!({ "content": "<|begin|>", "lstrip": false });
    write_json(&settings, &json!({ "bos_token": begin, "chat_template": "{{ bos_token }}one" }));
    assert_eq!(rendered(), "<|begin|>one");
    let named = json!([
        { "name": "tools", "template": "two" },
        { "name": "default", "template": "three" },
    ]);
    write_json(&settings, &json!({ "chat_template": named }));
    assert_eq!(rendered(), "three");
    write_json(&settings, &json!({ "chat_template": "{% if %}" }));
    refused(&folder, "tokenizer_config.json", &["chat template", "a chat_template.jinja replaces"]);
    fs::write(folder.path().join("chat_template.jinja"), "four").unwrap();
    assert_eq!(rendered(), "four");
}
