{{- /* The settings file of one service: what the chart knows, then the values' `config`.
       Field names are those of the services' config.py; `make check-deploy` loads every rendered
       file through those classes. */ -}}
{{- define "canopy.config" -}}
{{- $values := .root.Values -}}
{{- $own := get $values .name -}}
{{- $slice := include "canopy.slice" . | fromJson -}}
{{- $target := printf "%s/%s" $values.model.mountPath $values.model.target -}}
{{- $head := printf "%s/%s" $values.model.mountPath $values.model.head -}}
{{- $config := dict
  "host" "0.0.0.0"
  "port" (include "canopy.port" . | int)
  "metrics_port" (int $values.metricsPort)
  "drain_seconds" (int $own.drainSeconds)
  "log_format" $values.logFormat
-}}
{{- if eq .name "router" -}}
{{- $_ := set $config "model" $target -}}
{{- range $peer := without (include "canopy.services" .root | fromJsonArray) "router" -}}
{{- $_ := set $config $peer (include "canopy.replicas" (dict "root" $.root "name" $peer) | fromJsonArray) -}}
{{- end -}}
{{- else -}}
{{- $_ := set $config "platform" $slice.platform -}}
{{- $_ := set $config "chip" $slice.chip -}}
{{- $_ := set $config "compile_cache" "/var/cache/canopy" -}}
{{- if $slice.chipsPerHost }}{{ $_ := set $config "tensor_parallel" (mul $slice.chipsPerHost $slice.hosts | int) }}{{ end -}}
{{- end -}}
{{- if eq .name "verify" -}}
{{- $_ := set $config "model" $target -}}
{{- if $values.draft.enabled }}{{ $_ := set $config "head" $head }}{{ end -}}
{{- end -}}
{{- if eq .name "draft" -}}
{{- $_ := set $config "head" $head -}}
{{- $_ := set $config "target" $target -}}
{{- end -}}
{{- $security := $values.security -}}
{{- $public := eq .name "router" -}}
{{- $cert := ternary $security.publicTls $security.internalTls $public -}}
{{- if $cert -}}
{{- $at := ternary "/etc/canopy-public-tls" "/etc/canopy-internal-tls" $public -}}
{{- $_ := set $config "tls_cert" (printf "%s/tls.crt" $at) -}}
{{- $_ := set $config "tls_key" (printf "%s/tls.key" $at) -}}
{{- if or (not $public) $security.publicClientCa }}{{ $_ := set $config "tls_client_ca" (printf "%s/ca.crt" $at) }}{{ end -}}
{{- else if and $public $security.publicClientCa -}}
{{- fail "security.publicClientCa: needs security.publicTls; name the Secret of the router's certificate" -}}
{{- end -}}
{{- if ternary $security.publicTokens $security.internalTokens $public -}}
{{- $_ := set $config "token_file" (printf "/etc/canopy-%s-tokens/tokens" (ternary "public" "internal" $public)) -}}
{{- end -}}
{{- if and $public $security.internalTls -}}
{{- $_ := set $config "peer_ca" "/etc/canopy-internal-tls/ca.crt" -}}
{{- $_ := set $config "peer_cert" "/etc/canopy-internal-tls/tls.crt" -}}
{{- $_ := set $config "peer_key" "/etc/canopy-internal-tls/tls.key" -}}
{{- end -}}
{{- if and $public $security.internalTokens -}}
{{- $_ := set $config "peer_token_file" "/etc/canopy-internal-tokens/tokens" -}}
{{- end -}}
{{- mergeOverwrite $config (deepCopy $own.config) | toYaml -}}
{{- end -}}

{{- /* Addresses of every pod that may be called, as JSON: their names are stable. A replica that an
       autoscaler has not started is an address that does not answer. */ -}}
{{- define "canopy.replicas" -}}
{{- $own := get .root.Values .name -}}
{{- $name := include "canopy.serviceName" . -}}
{{- $most := ternary $own.replicas $own.autoscaling.maxReplicas (eq $own.autoscaling.kind "none") -}}
{{- $addresses := list -}}
{{- range $index := until (int $most) -}}
{{- $pod := printf "%s-%d.%s.%s.svc" $name $index $name $.root.Release.Namespace -}}
{{- $addresses = append $addresses (printf "%s:%s" $pod (include "canopy.port" $)) -}}
{{- end -}}
{{- toJson $addresses -}}
{{- end -}}

{{- define "canopy.address" -}}
{{ include "canopy.serviceName" . }}.{{ .root.Release.Namespace }}.svc:{{ include "canopy.port" . }}
{{- end -}}

{{- /* Whether the service itself speaks TLS: then Kubernetes' gRPC probes cannot ask it. */ -}}
{{- define "canopy.speaksTls" -}}
{{- if ternary .root.Values.security.publicTls .root.Values.security.internalTls (eq .name "router") }}yes{{ end -}}
{{- end -}}

{{- /* The Secrets of `security` that a service mounts, as JSON: mount's name to Secret's name. */ -}}
{{- define "canopy.secrets" -}}
{{- $security := .root.Values.security -}}
{{- $kinds := dict "internal-tls" $security.internalTls "internal-tokens" $security.internalTokens -}}
{{- if eq .name "router" -}}
{{- $kinds = merge $kinds (dict "public-tls" $security.publicTls "public-tokens" $security.publicTokens) -}}
{{- end -}}
{{- $named := dict -}}
{{- range $kind, $secret := $kinds }}{{ if $secret }}{{ $_ := set $named $kind $secret }}{{ end }}{{ end -}}
{{- toJson $named -}}
{{- end -}}
