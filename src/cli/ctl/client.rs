//! The way to the instances.

use std::{collections::BTreeMap, fs, path::PathBuf, time::Duration};

use anyhow::{Context, bail};
use clap::Args;
use sluicegate_proto::sluicegate::admin::v1::{self as api, admin_service_client::AdminServiceClient};
use tonic::{
    Code, Request, Response, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};

use super::print::Output;

/// An instance that does not answer by then does not answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where to, and who calls.
#[derive(Debug, Args)]
pub(super) struct Connection {
    /// The admin address of an instance, http:// or https://; several, separated by commas, for what is asked of all.
    #[arg(
        long,
        global = true,
        env = "SLUICEGATE_ADMIN",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:8082"
    )]
    addr: Vec<String>,
    /// A file with the token and nothing else.
    #[arg(long, global = true, env = "SLUICEGATE_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// The token; a file is better, since others can see a program's words.
    #[arg(long, global = true, env = "SLUICEGATE_TOKEN", hide_env_values = true, conflicts_with = "token_file")]
    token: Option<String>,
    /// For https://: the authorities to trust, in place of the system's.
    #[arg(long, global = true, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// For https://: the certificate to show.
    #[arg(long, global = true, value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,
    /// And its key.
    #[arg(long, global = true, value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
}

type Service = AdminServiceClient<InterceptedService<Channel, Token>>;

/// Shows the token with every call.
#[derive(Clone)]
struct Token(Option<MetadataValue<Ascii>>);

impl Interceptor for Token {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &self.0 {
            request.metadata_mut().insert("authorization", token.clone());
        }
        Ok(request)
    }
}

/// The instances; the first is the one that is told.
pub(super) struct Client {
    instances: Vec<(String, Service)>,
}

/// What all instances say.
pub(super) type All<T> = Vec<(String, anyhow::Result<T>)>;

impl Client {
    pub(super) async fn new(connection: &Connection) -> anyhow::Result<Self> {
        let read = |path: &PathBuf| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
        let token = match &connection.token_file {
            Some(path) => Some(String::from_utf8(read(path)?).context("the token is no text")?.trim().to_owned()),
            None => connection.token.clone(),
        };
        let token = token.map(|token| format!("Bearer {token}").parse()).transpose().context("the token is none")?;
        let mut instances = Vec::new();
        for addr in &connection.addr {
            let mut endpoint =
                Endpoint::from_shared(addr.clone()).with_context(|| format!("{addr:?} is no address"))?;
            if addr.starts_with("https:") {
                let mut tls = ClientTlsConfig::new();
                tls = match &connection.ca {
                    Some(ca) => tls.ca_certificate(Certificate::from_pem(read(ca)?)),
                    None => tls.with_native_roots(),
                };
                if let (Some(cert), Some(key)) = (&connection.cert, &connection.key) {
                    tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?));
                }
                endpoint = endpoint.tls_config(tls).context("TLS cannot be set up")?;
            } else if connection.ca.is_some() || connection.cert.is_some() {
                bail!("{addr} is not https://, and --ca and --cert would have no effect");
            }
            let channel = endpoint.connect_timeout(PATIENCE).timeout(PATIENCE).connect_lazy();
            let service = AdminServiceClient::with_interceptor(channel, Token(token.clone()));
            instances.push((addr.clone(), service.max_decoding_message_size(1 << 24)));
        }
        Ok(Self { instances })
    }

    fn first(&mut self) -> anyhow::Result<&mut (String, Service)> {
        self.instances.first_mut().context("--addr names no instance")
    }

    pub(super) async fn put(&mut self, request: api::PutOverridesRequest) -> anyhow::Result<api::PutOverridesResponse> {
        let (addr, service) = self.first()?;
        said(addr, service.put_overrides(request).await)
    }

    /// Tells every instance by itself; an error when one has not heard it.
    pub(super) async fn put_everywhere(
        &mut self,
        request: api::PutOverridesRequest,
        output: &Output,
    ) -> anyhow::Result<()> {
        let mut failed = 0;
        for (addr, service) in &mut self.instances {
            match said(addr, service.put_overrides(request.clone()).await) {
                Ok(_) => output.told(addr),
                Err(error) => {
                    failed += 1;
                    eprintln!("{error:#}");
                }
            }
        }
        if failed > 0 { bail!("{failed} of {} instances have not been told", self.instances.len()) } else { Ok(()) }
    }

    /// All overrides whose names begin so.
    pub(super) async fn list(&mut self, prefix: &str) -> anyhow::Result<Vec<api::Override>> {
        let (mut all, mut page_token) = (Vec::new(), String::new());
        loop {
            let page = self.page(prefix, page_token).await?;
            all.extend(page.overrides);
            if page.next_page_token.is_empty() {
                return Ok(all);
            }
            page_token = page.next_page_token;
        }
    }

    pub(super) async fn page(
        &mut self,
        prefix: &str,
        page_token: String,
    ) -> anyhow::Result<api::ListOverridesResponse> {
        let (addr, service) = self.first()?;
        let request = api::ListOverridesRequest { prefix: prefix.to_owned(), page_size: 1_000, page_token };
        said(addr, service.list_overrides(request).await)
    }

    pub(super) async fn inspect(&mut self, request: api::InspectRequest) -> anyhow::Result<api::InspectResponse> {
        let (addr, service) = self.first()?;
        said(addr, service.inspect(request).await)
    }

    pub(super) async fn forget(
        &mut self,
        request: api::ResetCounterRequest,
    ) -> anyhow::Result<api::ResetCounterResponse> {
        let (addr, service) = self.first()?;
        said(addr, service.reset_counter(request).await)
    }

    pub(super) async fn give_back(&mut self, request: api::RefundRequest) -> anyhow::Result<api::RefundResponse> {
        let (addr, service) = self.first()?;
        said(addr, service.refund(request).await)
    }

    pub(super) async fn rules(&mut self, request: api::ListRulesRequest) -> anyhow::Result<api::ListRulesResponse> {
        let (addr, service) = self.first()?;
        said(addr, service.list_rules(request).await)
    }

    pub(super) async fn changes(
        &mut self,
        request: api::ListAuditLogRequest,
    ) -> anyhow::Result<api::ListAuditLogResponse> {
        let (addr, service) = self.first()?;
        said(addr, service.list_audit_log(request).await)
    }

    pub(super) async fn health(&mut self) -> All<api::GetHealthResponse> {
        let mut all = Vec::new();
        for (addr, service) in &mut self.instances {
            all.push((addr.clone(), said(addr, service.get_health(api::GetHealthRequest {}).await)));
        }
        all
    }

    pub(super) async fn upload(
        &mut self,
        request: api::UploadCandidateRequest,
    ) -> anyhow::Result<api::UploadCandidateResponse> {
        let (addr, service) = self.first()?;
        said(addr, service.upload_candidate(request).await)
    }

    pub(super) async fn promote(
        &mut self,
        request: api::PromoteCandidateRequest,
    ) -> anyhow::Result<api::PromoteCandidateResponse> {
        let (addr, service) = self.first()?;
        said(addr, service.promote_candidate(request).await)
    }

    pub(super) async fn rollback(
        &mut self,
        request: api::RollbackRulesRequest,
    ) -> anyhow::Result<api::RollbackRulesResponse> {
        let (addr, service) = self.first()?;
        said(addr, service.rollback_rules(request).await)
    }

    pub(super) async fn drop_candidate(
        &mut self,
        request: api::DropCandidateRequest,
    ) -> anyhow::Result<api::DropCandidateResponse> {
        let (addr, service) = self.first()?;
        said(addr, service.drop_candidate(request).await)
    }

    /// What each instance has seen.
    pub(super) async fn candidate(&mut self) -> anyhow::Result<Vec<(String, api::GetCandidateResponse)>> {
        let mut all = Vec::new();
        for (addr, service) in &mut self.instances {
            all.push((addr.clone(), said(addr, service.get_candidate(api::GetCandidateRequest {}).await)?));
        }
        Ok(all)
    }

    /// The sums over all instances.
    pub(super) async fn top(
        &mut self,
        request: &api::ListTopEntitiesRequest,
    ) -> anyhow::Result<api::ListTopEntitiesResponse> {
        let mut merged = api::ListTopEntitiesResponse::default();
        let mut sums: BTreeMap<String, api::TopEntity> = BTreeMap::new();
        for (addr, service) in &mut self.instances {
            // Whoever is twentieth everywhere may be first of all.
            let request = api::ListTopEntitiesRequest { max_results: 1_000, ..request.clone() };
            let answer = said(addr, service.list_top_entities(request).await)?;
            merged.period_seconds = merged.period_seconds.max(answer.period_seconds);
            merged.total_hits += answer.total_hits;
            for top in answer.entities {
                let name = top.descriptor.as_ref().map(super::parse::name).unwrap_or_default();
                let sum = sums.entry(name).or_insert_with(|| api::TopEntity { hits: 0, max_error: 0, ..top.clone() });
                sum.hits += top.hits;
                sum.max_error += top.max_error;
                let earlier = |one: &prost_types::Timestamp, other: &prost_types::Timestamp| {
                    (one.seconds, one.nanos) < (other.seconds, other.nanos)
                };
                if let (Some(since), Some(before)) = (&top.since, &sum.since)
                    && earlier(since, before)
                {
                    sum.since = top.since;
                }
            }
        }
        merged.entities = sums.into_values().collect();
        merged.entities.sort_by_key(|top| std::cmp::Reverse(top.hits));
        merged.entities.truncate(request.max_results as usize);
        Ok(merged)
    }
}

/// What is wrong, in a sentence.
#[derive(Debug, thiserror::Error)]
#[error("{sentence}")]
struct CallError {
    code: Code,
    sentence: String,
}

/// Whether it may go better in a moment, and nothing is done twice.
pub(super) fn is_passing(error: &anyhow::Error) -> bool {
    error.downcast_ref::<CallError>().is_some_and(|refused| refused.code == Code::Unavailable)
}

/// What an instance said, or what is wrong in a sentence.
fn said<T>(addr: &str, answer: Result<Response<T>, Status>) -> anyhow::Result<T> {
    answer.map(Response::into_inner).map_err(|status| {
        let mut sentence = status.message().to_owned();
        let mut source = std::error::Error::source(&status);
        while let Some(cause) = source {
            let cause_says = cause.to_string();
            if !sentence.contains(&cause_says) {
                sentence += &format!(": {cause_says}");
            }
            source = cause.source();
        }
        CallError { code: status.code(), sentence: format!("{addr}: {sentence} ({:?})", status.code()) }.into()
    })
}
