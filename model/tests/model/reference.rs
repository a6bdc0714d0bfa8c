//! The architecture once more, in the plainest way: one token after the other, in double precision.

use std::f64::consts::TAU;

use serde_json::{Value, json};
use terrace_engine::Forward;

use crate::folder::{Dtype, Folder};
use terrace_kit::Dice;

use crate::world::World;

type Vector = Vec<f64>;

struct Reference<'a> {
    folder: &'a Folder,
    dim: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl<'a> Reference<'a> {
    fn new(folder: &'a Folder) -> Self {
        let size = |name: &str| folder.config[name].as_u64().map(|size| size as usize);
        let (dim, heads) = (size("hidden_size").unwrap(), size("num_attention_heads").unwrap());
        let kv_heads = size("num_key_value_heads").unwrap();
        let head_dim = size("head_dim").unwrap_or(dim / heads);
        Self { folder, dim, heads, kv_heads, head_dim }
    }

    fn tensor(&self, name: &str) -> Vector {
        self.folder.tensors[name].numbers.iter().map(|number| f64::from(*number)).collect()
    }

    fn times(&self, name: &str, x: &[f64]) -> Vector {
        let weights = self.tensor(&format!("{name}.weight"));
        let dot = |row: &[f64]| row.iter().zip(x).map(|(a, b)| a * b).sum();
        let mut out: Vector = weights.chunks(x.len()).map(dot).collect();
        if self.folder.tensors.contains_key(&format!("{name}.bias")) {
            let bias = self.tensor(&format!("{name}.bias"));
            out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
        }
        out
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vector {
        let epsilon = self.folder.config["rms_norm_eps"].as_f64().unwrap();
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let weights = self.tensor(name);
        x.iter().zip(weights).map(|(x, w)| x / (mean + epsilon).sqrt() * w).collect()
    }

    /// Norms each head by itself, where the model has such a norm.
    fn norm_heads(&self, name: &str, x: &mut [f64]) {
        if self.folder.tensors.contains_key(name) {
            for head in x.chunks_mut(self.head_dim) {
                let normed = self.norm(name, head);
                head.copy_from_slice(&normed);
            }
        }
    }

    fn frequency(&self, pair: usize) -> f64 {
        let theta = self.folder.config["rope_theta"].as_f64().unwrap();
        let frequency = 1.0 / theta.powf(2.0 * pair as f64 / self.head_dim as f64);
        let scaling = &self.folder.config["rope_scaling"];
        let number = |name: &str| scaling[name].as_f64().unwrap();
        match scaling["rope_type"].as_str() {
            None => frequency,
            Some("linear") => frequency / number("factor"),
            Some(_) => {
                let original = number("original_max_position_embeddings");
                let (low, high) = (number("low_freq_factor"), number("high_freq_factor"));
                let wavelength = TAU / frequency;
                if wavelength < original / high {
                    frequency
                } else if wavelength > original / low {
                    frequency / number("factor")
                } else {
                    let smooth = (original / wavelength - low) / (high - low);
                    (1.0 - smooth) * frequency / number("factor") + smooth * frequency
                }
            }
        }
    }

    fn turn(&self, x: &mut [f64], position: usize) {
        let half = self.head_dim / 2;
        for head in x.chunks_mut(self.head_dim) {
            for pair in 0..half {
                let angle = position as f64 * self.frequency(pair);
                let (a, b) = (head[pair], head[pair + half]);
                head[pair] = a * angle.cos() - b * angle.sin();
                head[pair + half] = b * angle.cos() + a * angle.sin();
            }
        }
    }

    /// The logits after each token.
    fn logits(&self, tokens: &[u32]) -> Vec<Vector> {
        let layers = self.folder.config["num_hidden_layers"].as_u64().unwrap();
        let mut kv: Vec<Vec<(Vector, Vector)>> = vec![Vec::new(); layers as usize];
        let embeddings = self.tensor("model.embed_tokens.weight");
        let step = |(position, token): (usize, &u32)| {
            let mut x = embeddings[*token as usize * self.dim..][..self.dim].to_vec();
            for (layer, kv) in kv.iter_mut().enumerate() {
                let name = |part: &str| format!("model.layers.{layer}.{part}");
                let normed = self.norm(&name("input_layernorm.weight"), &x);
                let mut queries = self.times(&name("self_attn.q_proj"), &normed);
                let mut keys = self.times(&name("self_attn.k_proj"), &normed);
                self.norm_heads(&name("self_attn.q_norm.weight"), &mut queries);
                self.norm_heads(&name("self_attn.k_norm.weight"), &mut keys);
                self.turn(&mut queries, position);
                self.turn(&mut keys, position);
                kv.push((keys, self.times(&name("self_attn.v_proj"), &normed)));
                let found = self.attend(&queries, kv);
                add(&mut x, &self.times(&name("self_attn.o_proj"), &found));

                let normed = self.norm(&name("post_attention_layernorm.weight"), &x);
                let gate = self.times(&name("mlp.gate_proj"), &normed);
                let up = self.times(&name("mlp.up_proj"), &normed);
                let gated: Vector =
                    gate.iter().zip(up).map(|(g, up)| g / (1.0 + (-g).exp()) * up).collect();
                add(&mut x, &self.times(&name("mlp.down_proj"), &gated));
            }
            let x = self.norm("model.norm.weight", &x);
            let tied = self.folder.config["tie_word_embeddings"] == true;
            self.times(if tied { "model.embed_tokens" } else { "lm_head" }, &x)
        };
        tokens.iter().enumerate().map(step).collect()
    }

    fn attend(&self, queries: &[f64], kv: &[(Vector, Vector)]) -> Vector {
        let d = self.head_dim;
        let head = |head: usize| {
            let query = &queries[head * d..][..d];
            let kv_head = head / (self.heads / self.kv_heads);
            let score = |key: &[f64]| {
                let dot: f64 = query.iter().zip(key).map(|(a, b)| a * b).sum();
                (dot / (d as f64).sqrt()).exp()
            };
            let weights: Vector =
                kv.iter().map(|(keys, _)| score(&keys[kv_head * d..][..d])).collect();
            let sum: f64 = weights.iter().sum();
            (0..d)
                .map(move |element| {
                    let value = |(weight, (_, values)): (&f64, &(Vector, Vector))| {
                        weight / sum * values[kv_head * d + element]
                    };
                    weights.iter().zip(kv).map(value).sum::<f64>()
                })
                .collect::<Vector>()
        };
        (0..self.heads).flat_map(head).collect()
    }
}

fn add(x: &mut [f64], more: &[f64]) {
    x.iter_mut().zip(more).for_each(|(x, more)| *x += more);
}

fn agrees_with_the_reference(folder: &Folder) {
    let mut model = folder.load().unwrap().model;
    let tokens = Dice::new(3).tokens(290, model.vocabulary());
    let expected = Reference::new(folder).logits(&tokens);
    let mut world = World::new(&model, 16, vec![tokens], |_| {});
    for (end, start) in [1, 2, 100, 256, 290].into_iter().zip([0, 1, 2, 100, 256]) {
        let logits = &world.step(&mut model, &[(0, start..end)])[0];
        let expected = &expected[end - 1];
        let size = expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64;
        assert!(size > 0.01, "logits that say nothing: {size}");
        for (token, (found, expected)) in logits.iter().zip(expected).enumerate() {
            let error = (f64::from(*found) - expected).abs() / (1.0 + expected.abs());
            assert!(error < 1e-4, "token {token} after {end}: {found}, not {expected}");
        }
    }
}

#[test]
fn a_llama_computes_what_the_reference_does() {
    agrees_with_the_reference(&Folder::llama());
}

#[test]
fn a_qwen2_with_biases_and_scaled_positions_computes_what_the_reference_does() {
    agrees_with_the_reference(&Folder::qwen2());
}

#[test]
fn a_qwen3_with_norms_of_queries_and_keys_computes_what_the_reference_does() {
    let mut folder = Folder::qwen3();
    agrees_with_the_reference(&folder);
    folder.tensors.get_mut("model.layers.1.self_attn.k_norm.weight").unwrap().numbers[3] += 1.0;
    agrees_with_the_reference(&folder);
}

#[test]
fn linear_scaling_is_computed_as_in_the_reference() {
    let mut folder = Folder::llama();
    folder.config["rope_scaling"] = json!({ "rope_type": "linear", "factor": 2.5 });
    agrees_with_the_reference(&folder);
}

#[test]
fn half_precision_weights_compute_the_same_when_they_are_exact() {
    let logits = |folder: &Folder| {
        let mut model = folder.load().unwrap().model;
        let tokens = Dice::new(3).tokens(20, model.vocabulary());
        World::new(&model, 16, vec![tokens], |_| {}).step(&mut model, &[(0, 0..20)])
    };
    let mut folder = Folder::llama();
    let expected = logits(&folder);
    folder.dtype = Dtype::Bf16;
    assert_eq!(logits(&folder), expected);
    folder.shards = 3;
    assert_eq!(logits(&folder), expected);
    // These have fewer exponents, which rounds the very smallest numbers.
    folder.dtype = Dtype::F16;
    for (found, expected) in logits(&folder)[0].iter().zip(&expected[0]) {
        assert!((found - expected).abs() < 1e-3);
    }
}

#[test]
fn head_size_follows_from_the_width_when_it_is_not_given() {
    let mut folder = Folder::qwen2();
    folder.config["head_dim"] = Value::Null;
    agrees_with_the_reference(&folder);
}
